"""Tests the pods of a user's program: its container, the agent's container, and their variables."""

import json
import subprocess
import sys
import threading
from unittest.mock import create_autospec

import pytest
import yaml

from flotilla.components.kubernetes.jobset import JobSets
from flotilla.components.kubernetes.pods import pod_state, shutdown
from flotilla.components.kubernetes.pods.program_agent import Reaction
from flotilla.components.kubernetes.pods.shutdown import ShutdownServer
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.requirements import describe_lack, require_sidecars
from flotilla.components.launchers import render_job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.program.agent import Agent
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, DONE, FAILED, USAGE, ConfigError
from tests.components.kubernetes.attempts import EACH_ENGINE, job_of
from tests.kubernetes.admission import ENFORCE, refusal
from tests.kubernetes.containers import expanded

WORDS = ["python", "/var/tf_mnist/mnist_test.py", "--epochs=$(N)"]
# The configuration that corresponds to a handwritten TFJob for a user's program.
SEED = """
name: mnist
program:
  command: [python, /var/tf_mnist/mnist_test.py]
  roles: {ps: 1, worker: 2}
  python: ""
cluster:
  launcher: tfjob
  kubernetes:
    namespace: kubeflow
    pod:
      image: registry.example.com/tf-dist-mnist-test:1.0
      resources: {limits: {nvidia.com/gpu: 2}}
      node_selector: {accelerator: nvidia-tesla-k80}
      restart_policy: OnFailure
"""


def made(engine, program=None, **cluster):
    own = {"command": WORDS, "roles": {"ps": 1, "worker": 2}, **(program or {})}
    job = job_of({"program": own, "cluster": cluster})
    place = Place(namespace="team", variables={"AWS_REGION": "eu-1", "MLFLOW_RUN_ID": "r"})
    templates = engine.templates(engine.manifest(job, place))
    return {role: each["spec"] for role, each in templates.items()}


def env(container):
    return {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize("python", ["", "python"])
def test_the_manifest_is_the_tfjob_of_its_authors(python):
    assert len(SEED.strip().splitlines()) <= 20
    tree = yaml.safe_load(SEED)
    tree["program"]["python"] = python
    job = render_job(parse_config(tree))
    assert (job["kind"], job["metadata"]["namespace"]) == ("TFJob", "kubeflow")
    roles = job["spec"]["tfReplicaSpecs"]
    assert {role: each["replicas"] for role, each in roles.items()} == {"PS": 1, "Worker": 2}
    for each in roles.values():
        assert each["restartPolicy"] == "OnFailure"
        spec = each["template"]["spec"]
        assert spec["nodeSelector"] == {"accelerator": "nvidia-tesla-k80"}
        [container] = spec["containers"]
        assert container["name"] == "tensorflow"
        assert container["image"] == "registry.example.com/tf-dist-mnist-test:1.0"
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
        words = ["python", "/var/tf_mnist/mnist_test.py"]
        # If the image contains Python, the guard starts the same command.
        assert container["args" if python else "command"] == words
        assert bool(python) == (container["command"][:2] == [python, "/flotilla/exchange/guard.py"])


@EACH_ENGINE
def test_the_agent_is_a_sidecar_with_the_image_of_flotilla(engine):
    for role, spec in made(engine, kubernetes={"pod": {"image": "own/program:1"}}).items():
        [agent], [user] = spec["initContainers"], spec["containers"]
        assert (agent["restartPolicy"], agent["image"]) == ("Always", "flotilla-python:0.1.0")
        assert user["image"] == "own/program:1"
        shared = {"name": "scratch", "mountPath": "/flotilla"}
        assert shared in agent["volumeMounts"]
        assert shared in user["volumeMounts"]
        probe = agent["startupProbe"]["exec"]["command"]
        assert probe == ["test", "-S", "/flotilla/exchange/guard.sock"]
        assert user["terminationMessagePath"] in user["command"]
        assert "workingDir" not in user
        assert user["args"] == [word.replace("$", "$$") for word in WORDS]
        given = env(agent)
        assert json.loads(given["FLOTILLA_CONFIG"])["program"]["command"]
        task = expanded(given["TF_CONFIG"], {"FLOTILLA_TASK_INDEX": "1", "FLOTILLA_NAMESPACE": "n"})
        seen = json.loads(task)
        assert seen["task"] == {"type": role, "index": 1}
        assert {name: len(hosts) for name, hosts in seen["cluster"].items()} == {
            "ps": 1,
            "worker": 2,
        }


@EACH_ENGINE
def test_a_pod_of_a_program_is_admitted_by_restricted_pod_security(engine):
    for spec in made(engine).values():
        pod = {"metadata": {"name": "x"}, "spec": spec}
        assert not refusal(pod, {ENFORCE: "restricted"})
        every = [*spec["initContainers"], *spec["containers"]]
        assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in every)
    # If the pod sets no user, each container runs as the user of its image.
    user = {"runAsUser": 1001, "fsGroup": 1001}
    spec = made(engine, kubernetes={"pod": {"security_context": user}})["worker"]
    assert spec["securityContext"].items() >= user.items()
    every = [*spec["initContainers"], *spec["containers"]]
    assert not any(user.keys() & each["securityContext"].keys() for each in every)
    loose = made(engine, kubernetes={"pod": {"security": "image"}})["worker"]
    assert "securityContext" not in loose
    assert "securityContext" not in loose["containers"][0]
    assert loose["initContainers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


@EACH_ENGINE
def test_the_program_gets_the_users_variables_and_the_store_only_for_a_uri(engine):
    pod = {"pod": {"env": {"OWN": "1"}, "secret_env": {"TOKEN": "s/key"}}}
    files, uri = (
        env(made(engine, {"data": data}, kubernetes=pod)["worker"]["containers"][0])
        for data in ("files", "uri")
    )
    assert files.keys() == {"OWN", "TOKEN", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"}
    assert uri.keys() - files.keys() == {"AWS_REGION"}


@EACH_ENGINE
def test_without_python_the_program_is_the_command_itself(engine):
    program = {
        "python": "",
        "command": ["/app/train", "--ps={ps_hosts}", "--task={role}:{index}", "--data={dataset}"],
        "env": {"N": "{num_workers}"},
        "working_dir": "/app",
    }
    spec = made(engine, program)["worker"]
    assert "initContainers" not in spec
    [user] = spec["containers"]
    assert user["workingDir"] == "/app"
    given = env(user)
    named = {"FLOTILLA_TASK_INDEX": "1", "FLOTILLA_NAMESPACE": "team"}
    [name, servers, task, data] = [expanded(word, named) for word in user["command"]]
    assert (name, task, data) == ("/app/train", "--task=worker:1", "--data=gs://b/d")
    assert servers.startswith("--ps=digits-")
    assert servers.endswith(":2222")
    assert given["N"] == "2"
    # For a TFJob, the training operator itself sets TF_CONFIG in this container.
    assert ("TF_CONFIG" in given) == isinstance(engine, JobSets)


@EACH_ENGINE
@pytest.mark.parametrize(
    ("tree", "line"),
    [
        (
            {"program": {"command": ["a", "{checkpoints}"], "python": ""}},
            "program.command: only Flotilla's agent replaces {checkpoints}, and it needs Python in "
            "the image; set program.python, or remove the placeholder",
        ),
        (
            {"program": {"command": ["a"], "python": "", "after_training": "evaluate"}},
            "program.after_training: 'evaluate' needs a model, which Flotilla's agent publishes "
            "only if the image has Python; set program.python, or set program.after_training=stop",
        ),
        (
            {
                "program": {"command": ["a"]},
                "cluster": {"kubernetes": {"worker": {"command": ["b"]}}},
            },
            "cluster.kubernetes.worker.command: program.command already sets the command; "
            "remove this key",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_program_are_refused(engine, tree, line):
    with pytest.raises(ConfigError) as caught:
        engine.check(parse_config(tree))
    assert str(caught.value) == line


@pytest.mark.parametrize("version", ["v1.29.0", "v1.33.4+k3s1", "v2.0", "", "unknown"])
def test_kubernetes_1_29_has_native_sidecars(version):
    assert not describe_lack(version)


def test_an_older_cluster_is_refused_in_one_line():
    class Old:
        def read(self, path):
            assert path == "/version"
            return {"gitVersion": "v1.28.9-gke.1"}

    config = parse_config({"program": {"command": ["a"]}})
    line = (
        "native sidecars, which Kubernetes 1.28 does not have: update Kubernetes to 1.29 or later"
    )
    with pytest.raises(ConfigError, match=line):
        require_sidecars(Old(), config)
    require_sidecars(Old(), parse_config({"program": {"command": ["a"], "python": ""}}))


def pod_with(agent):
    waits = {"name": "tensorflow", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"containerStatuses": [waits], "initContainerStatuses": [{"name": "flotilla-agent"}]}
    status["initContainerStatuses"][0] |= agent
    spec = {"initContainers": [{"name": "flotilla-agent"}], "containers": []}
    return {"metadata": {"name": "p"}, "spec": spec, "status": status}


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "CrashLoopBackOff"])
def test_an_agent_that_does_not_start_is_why_the_pod_waits(reason):
    pod = pod_with({"state": {"waiting": {"reason": reason, "message": "why"}}})
    assert pod_state.start_failure(pod) == reason
    assert pod_state.waiting_reason(pod) == f"{reason}: why"
    assert not pod_state.waits_as_usual(pod)


def test_the_logs_of_both_containers_are_followed():
    pod = pod_with({"state": {"running": {}}, "restartCount": 2})
    assert pod_state.logging_containers(pod) == ["tensorflow", "flotilla-agent"]
    assert pod_state.has_started(pod, "flotilla-agent")
    assert not pod_state.has_started(pod)
    assert pod_state.restart_count(pod, "flotilla-agent") == 2


LEADER, SERVER = Task(role="worker", index=0), Task(role="ps", index=0)
CLUSTER = Cluster(addresses={"ps": ("localhost:1",), "worker": ("localhost:2",)})


@pytest.fixture
def agent():
    return create_autospec(Agent, instance=True)


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """Replace the leader's server, which would hold the default port until this process ends."""
    made = create_autospec(ShutdownServer, instance=True)
    monkeypatch.setattr(shutdown, "ShutdownServer", lambda _servers: made)
    return made


def test_the_leader_stops_at_once(agent):
    reaction = Reaction(CLUSTER, LEADER, 10)
    reaction.agent = agent
    reaction.take(15)
    agent.stop.assert_called_once_with()


def test_a_server_waits_for_the_leader(agent, monkeypatch):
    waits = []

    class Connection:
        def __init__(self, host):
            self.host = host

        def wait(self, _notice, timeout):
            waits.append((self.host, timeout))
            assert not agent.stop.called

    monkeypatch.setattr(shutdown, "ShutdownConnection", Connection)
    reaction = Reaction(CLUSTER, SERVER, 10)
    reaction.agent = agent
    reaction.take(15)
    agent.begin_no_more.assert_called_once_with()
    for thread in threading.enumerate():
        if "(end)" in thread.name:
            thread.join(10)
    assert waits == [("localhost", 10)]
    agent.stop.assert_called_once_with()


@pytest.mark.parametrize("code", [DONE, BEGIN_AGAIN])
def test_only_the_end_of_a_leader_that_is_done_is_announced(code, server):
    Reaction(CLUSTER, LEADER, 10).finish(code)
    assert server.announce.called == (code == DONE)


def test_a_job_that_is_asked_to_end_fails_so_that_no_pod_comes_again(agent):
    reaction = Reaction(CLUSTER, LEADER, 10)
    reaction.agent = agent
    reaction.end_job("no heartbeat")
    agent.stop.assert_called_once_with("no heartbeat", code=FAILED)
    # Because of this flag, the agent deletes the job after the program's container has ended.
    assert reaction.ends_job


def test_a_pod_without_its_cluster_is_refused_in_one_line(tmp_path):
    module = "flotilla.components.kubernetes.pods.program_agent"
    found = subprocess.run(
        [sys.executable, "-m", module, "--dataset", "d", "--checkpoints", "c"],
        cwd=tmp_path,
        env={"TF_CONFIG": json.dumps({}), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == USAGE
    assert found.stderr.splitlines()[-1].startswith("agent: TF_CONFIG: 'cluster' must map roles")
