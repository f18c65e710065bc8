"""Tests the settings of the steps' pods: values for KFP, retries, and deadlines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.tfjob import TFJobs
from flotilla.components.table import STEPS
from flotilla.pipelines.compile import compile_pipeline, load_package
from flotilla.pipelines.step_settings import NO_SETTINGS, RUN_SECONDS, StepPods, step_pods
from flotilla.pipelines.training import PIPELINES
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import JobConfig
from flotilla.trainer.config.form import to_local_form
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import ConfigError
from tests.stores.fixtures import bucket_name
from tests.stores.s3_server import s3_server

PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")
ROWS = {step.kfp_name: step for step in STEPS}


def compiled(folder, pods=NO_SETTINGS):
    """Return the two documents of the compiled pipeline."""
    compile_pipeline(folder / "pipeline.yaml", pods=pods)
    text = (folder / "pipeline.yaml").read_text(encoding="utf-8")
    return list(yaml.load_all(text, yaml.CSafeLoader))


def pods_of(documents):
    executors = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): each for name, each in executors.items()}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def groups(documents):
    """Return every group of tasks, starting with the root group."""
    spec = documents[0]
    return [spec["root"], *(each for each in spec["components"].values() if "dag" in each)]


@pytest.fixture(scope="module")
def tasks(groups):
    return {
        task["componentRef"]["name"].removeprefix("comp-"): task
        for group in groups
        for task in group["dag"]["tasks"].values()
        if task["componentRef"]["name"].removeprefix("comp-") in ROWS
    }


@pytest.fixture(scope="module")
def containers(documents):
    executors = documents[0]["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): each["container"] for name, each in executors.items()}


@pytest.fixture(scope="module")
def pods(documents):
    return pods_of(documents)


def channels_of(tree):
    """Yield the names of the outer group's inputs that a tree refers to."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "componentInputParameter":
                yield value
            else:
                yield from channels_of(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from channels_of(each)


def test_every_step_and_the_run_have_a_deadline_and_retries(documents, tasks, pods):
    seconds = {step: int(pod["activeDeadlineSeconds"]) for step, pod in pods.items()}
    assert seconds == {name: row.deadline_seconds for name, row in ROWS.items()}
    # The job reaches its own deadline first, and the step reports it.
    assert seconds["train-model"] > JobConfig().active_deadline_seconds
    assert sum(seconds.values()) < RUN_SECONDS
    config = documents[1]["platforms"]["kubernetes"]["pipelineConfig"]
    assert config == {"activeDeadlineSeconds": RUN_SECONDS, "resourceTtlOnCompletion": 604_800}
    policies = {step: task.get("retryPolicy", {}) for step, task in tasks.items()}
    retries = {step: policy.get("maxRetryCount", 0) for step, policy in policies.items()}
    assert retries == {name: row.retries for name, row in ROWS.items()}
    assert retries["prepare-data"] == 3
    for step, policy in policies.items():
        if policy:
            # This window includes the first attempt. With KFP's default of one hour, a step that
            # runs longer would never be retried.
            assert policy["backoffMaxDuration"] == f"{RUN_SECONDS}s"
            assert seconds[step] < RUN_SECONDS, step
            assert (policy["backoffDuration"], policy["backoffFactor"]) == ("60s", 2.0)


def test_every_value_is_there_where_kfp_looks_for_it(groups, pods):
    for group in groups:
        there = set(group["inputDefinitions"]["parameters"])
        for task in group["dag"]["tasks"].values():
            step = task["componentRef"]["name"].removeprefix("comp-")
            assert set(channels_of(task)) <= there, step
            assert set(channels_of(pods.get(step, {}))) <= there, step


def test_every_placeholder_of_a_pod_is_an_input_of_its_step(tasks, containers):
    for step, container in containers.items():
        wanted = set(PLACEHOLDER.findall(str({**container, "command": [], "args": []})))
        assert wanted <= set(tasks[step]["inputs"]["parameters"]), step
        assert "pipelinechannel--image" in wanted


def test_every_pod_has_the_labels_that_kubernetes_recommends(pods):
    for step, pod in pods.items():
        labels = pod["podMetadata"]["labels"]
        assert labels == names.app_labels(step, "{{workflow.uid}}")
        assert labels["app.kubernetes.io/component"] == step


@pytest.mark.parametrize("name", PIPELINES)
def test_on_this_machine_nothing_is_tried_again_or_set_up(name):
    spec = PIPELINES[name].pipeline_spec
    tasks = [task for each in spec.components.values() for task in each.dag.tasks.values()]
    for task in [*tasks, *spec.root.dag.tasks.values()]:
        assert not task.retry_policy.max_retry_count
    assert "resources" not in str(spec.deployment_spec)
    assert not PIPELINES[name].platform_spec.platforms


def test_both_are_the_same_steps_in_the_same_order(documents, groups):
    local = PIPELINES["run"].pipeline_spec
    for name, component in local.components.items():
        there = documents[0]["components"][name]
        if "dag" in there:
            assert set(there["dag"]["tasks"]) == set(component.dag.tasks)
            for task, each in component.dag.tasks.items():
                waits = there["dag"]["tasks"][task].get("dependentTasks", [])
                assert list(each.dependent_tasks) == waits
    assert set(groups[0]["dag"]["tasks"]) == set(local.root.dag.tasks)


ROOT = Path(__file__).parents[2]
# Keys in KFP's secret `mlpipeline-minio-artifact`, and keys that a user's secret may have.
SECRETS = {
    "KFP's own": {"accesskey": "kfp", "secretkey": "hush-hush"},
    "one's own": {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "hush-hush"},
}
# This machine's environment variables must not replace the values.
NOWHERE = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), "/nowhere")
BARE = {"AWS_EC2_METADATA_DISABLED": "true", **NOWHERE}


@pytest.fixture(scope="module")
def server():
    with s3_server() as found:
        yield found


@pytest.fixture
def bucket(server):
    name = bucket_name()
    server.create_bucket(name)
    return name


@pytest.fixture
def root(server, bucket):
    address = server.url.removeprefix("http://")
    return f"minio://{bucket}/a root?endpoint={address}&disableSSL=true"


def variables_of(pod, secret):
    """Return the variables that Kubernetes gives a step; missing keys of a secret are skipped."""
    (secret_env,) = pod["secretAsEnv"]
    keys = {each["envVar"]: each["secretKey"] for each in secret_env["keyToEnv"]}
    return {variable: secret[key] for variable, key in keys.items() if key in secret}


def run(module, name, folder, root, variables):
    arguments = to_local_form(parse_config({"storage": {"root": root}}))
    if name == "two_steps":
        arguments["path"] = str(folder / "kept.json")
    (folder / "arguments.json").write_text(json.dumps(arguments), encoding="utf-8")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        [sys.executable, "-m", module, name, str(folder)], cwd=ROOT,
        env={"PATH": path, "TMPDIR": str(folder), **BARE, **variables},
        check=False, text=True, capture_output=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("secret", SECRETS)
def test_the_first_step_reads_the_store(root, secret, pods, tmp_path):
    given = variables_of(pods["prepare-data"], SECRETS[secret])
    ended = run("tests.pipelines.two_steps", "two_steps", tmp_path, root, given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert kept["root"] == root
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert b"hush-hush" not in path.read_bytes(), path
    assert "hush-hush" not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_without_the_secret_a_step_starts_and_says_what_it_misses(root, tmp_path):
    ended = run("tests.pipelines.two_steps", "two_steps", tmp_path, root, {})
    assert ended.returncode == 1
    (line,) = re.findall(r"flotilla: resolve_config: .*", ended.stdout)
    assert "missing or wrong credentials" in line


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_dataset_is_published_there(root, server, bucket, pods, tmp_path):
    given = variables_of(pods["prepare-data"], SECRETS["KFP's own"])
    ended = run("flotilla.pipelines.runs.local_child", "prepare", tmp_path, root, given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    keys = server.keys(bucket)
    assert [key for key in keys if re.fullmatch(r"a root/datasets/digits-\w+/MANIFEST.json", key)]
    assert "hush-hush" not in ended.stdout + ended.stderr


@pytest.mark.parametrize("secret", SECRETS)
def test_a_task_of_the_job_gets_the_same_as_a_step(root, secret, pods):
    job = Job(config=parse_config({}), dataset=root, checkpoints=f"{root}/c", workdir=Path())
    tree = TFJobs().manifest(job, Place(namespace="models"))
    pod = tree["spec"]["tfReplicaSpecs"]["PS"]["template"]["spec"]["containers"][0]
    references = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in pod["env"]
        if "valueFrom" in each
    }
    assert all(each["optional"] for each in references.values())
    held = SECRETS[secret]
    found = {name: held[each["key"]] for name, each in references.items() if each["key"] in held}
    assert found == variables_of(pods["train-model"], held)


def test_a_run_and_a_schedule_get_an_image(instance, remote, uploaded):
    assert remote("submit", "--image", "a/b:2").code == 0
    [run] = instance.store.runs.values()
    assert run["runtime_config"]["parameters"]["image"] == "a/b:2"
    for image in ("a/b:2", "a/b:2", "a/b:3"):
        assert remote("schedule", "--every", "6h", "--image", image).code == 0
    [one] = instance.store.recurring.values()
    assert one["runtime_config"]["parameters"]["image"] == "a/b:3"
    assert uploaded


@pytest.mark.parametrize("command", ["submit", "schedule"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parameter", "step_memory=16Gi"],
         "step_memory: no longer supported; use --memory of `flotilla compile`"),
        (["--parameter=training_steps=5"],
         "training_steps: no longer supported; use the field steps, or --set"),
        (["--parameter", "image=a/b:2"], "image: no longer supported; use --image IMAGE"),
        (["--parameter"], ": no longer supported; set a key"),
    ],
)  # fmt: skip
def test_a_run_parameter_of_before_is_refused_with_its_spelling(remote, command, words, said):
    answer = remote(command, *words)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"--parameter {said}" in answer.err


GIVEN = {
    "cpu": "2500m",
    "memory": "16Gi",
    "gpus": "1",
    "node_selector": ["pool=large"],
    "tolerations": ['{"key": "spot", "operator": "Exists"}', "{key: gpu, effect: NoSchedule}"],
    "store_secret": "ours",
    "pull_secrets": ["registry", "registry"],
    "mounts": ["official:/data/official", "more:/data/more"],
    "scratch": "50Gi",
    "labels": ["kueue.x-k8s.io/queue-name=team-a", "team="],
    "variables": ["HTTPS_PROXY=http://proxy:3128", "EMPTY="],
}


@pytest.fixture(scope="module")
def pods_documents(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("compiled"), step_pods(**GIVEN))


@pytest.fixture(scope="module")
def pods_pods(pods_documents):
    found = pods_of(pods_documents)
    assert set(found) == set(ROWS)
    return found


def constant(parameter):
    return parameter["runtimeValue"]["constant"]


def test_a_working_step_gets_what_is_asked_for(pods_documents, pods_pods):
    executors = pods_documents[0]["deploymentSpec"]["executors"]
    for step, pod in pods_pods.items():
        found = executors[f"exec-{step}"]["container"]["resources"]
        assert ("accelerator" in found) == ROWS[step].may_use_gpus
        if ROWS[step].is_light:
            assert found["resourceMemoryLimit"] == "2Gi"
            assert not {"nodeSelector", "tolerations"} & set(pod)
            continue
        for kind in ("Limit", "Request"):
            assert found[f"resourceCpu{kind}"] == "2500m"
            assert found[f"resourceMemory{kind}"] == "16Gi"
        selector = pod["nodeSelector"]["nodeSelectorJson"]
        assert constant(selector) == {"pool": "large"}
        assert pod["tolerations"] == [
            {"key": "spot", "operator": "Exists"},
            {"key": "gpu", "effect": "NoSchedule"},
        ]


def test_a_secret_of_ones_own_reaches_the_steps_and_the_job(pods_documents, pods_pods):
    for pod in pods_pods.values():
        [secret] = pod["secretAsEnv"]
        assert constant(secret["secretNameParameter"]) == "ours"
    [train] = [
        each["dag"]["tasks"]["train-model"]
        for each in pods_documents[0]["components"].values()
        if "train-model" in each.get("dag", {}).get("tasks", {})
    ]
    assert constant(train["inputs"]["parameters"]["store_secret"]) == "ours"


def test_every_step_gets_pull_secrets_labels_and_variables(pods_documents, pods_pods):
    executors = pods_documents[0]["deploymentSpec"]["executors"]
    for step, pod in pods_pods.items():
        [secret] = pod["imagePullSecret"]
        assert constant(secret["secretNameParameter"]) == "registry"
        labels = pod["podMetadata"]["labels"]
        assert labels.items() >= {"kueue.x-k8s.io/queue-name": "team-a", "team": ""}.items()
        assert labels["app.kubernetes.io/component"] == step
        env = executors[f"exec-{step}"]["container"]["env"]
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in env
        assert "EMPTY" in [each["name"] for each in env]


def test_claims_are_mounted_where_data_is_prepared_alone(pods_pods):
    mounted = {
        step: {constant(each["pvcNameParameter"]): each["mountPath"] for each in pod["pvcMount"]}
        for step, pod in pods_pods.items()
        if "pvcMount" in pod
    }
    assert mounted == {"prepare-data": {"official": "/data/official", "more": "/data/more"}}


def test_scratch_is_the_folder_of_temporary_files_of_every_working_step(pods_pods):
    for step, pod in pods_pods.items():
        found = [(each["mountPath"], each["sizeLimit"]) for each in pod.get("emptyDirMounts", [])]
        assert found == ([] if ROWS[step].is_light else [("/tmp", "50Gi")])


def test_without_settings_the_pipeline_is_the_same_and_a_compiled_file_takes_no_more():
    assert step_pods() == NO_SETTINGS
    with pytest.raises(ConfigError, match="a setting of the pods applies to compilation, but"):
        load_package(Path("pipeline.yaml"), "", StepPods(scratch="1Gi"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pull_secrets": ["My_Secret"]}, "--pull-secret 'My_Secret' is not a valid Kubernetes"),
        ({"pull_secrets": [""]}, "--pull-secret '' is not a valid Kubernetes name"),
        ({"mounts": ["data"]}, "--mount 'data' does not have the form CLAIM:FOLDER"),
        ({"mounts": [":/data"]}, "--mount ':/data' does not have the form"),
        ({"mounts": ["a.b:/data"]}, "--mount 'a.b' is not the name of a claim that KFP can mount"),
        ({"mounts": ["data:data"]}, "--mount 'data' is not a folder in a pod: give a path such as"),
        ({"mounts": ["data:/"]}, "--mount '/' is not a folder in a pod"),
        ({"mounts": ["data:/a/../etc"]}, "--mount '/a/../etc' is not a folder"),
        ({"mounts": ["data:/a:ro"]}, "--mount '/a:ro' is not a folder"),
        ({"mounts": ["data:/tmp/x"]}, "--mount '/tmp/x' is in a folder that the image or KFP uses"),
        ({"mounts": ["data:/gcs"]}, "--mount '/gcs' is in a folder that the image or KFP uses"),
        ({"mounts": ["a:/data", "b:/data"]}, "--mount /data is given twice"),
        ({"mounts": ["a:/data", "a:/more"]}, "--mount a is given twice"),
        ({"cpu": "abc"}, "--cpu 'abc' is not a Kubernetes quantity"),
        ({"memory": "16"}, "--memory '16' is less than 1Mi"),
        ({"gpus": "-1"}, "--gpus '-1' is not a number of GPUs"),
        ({"node_selector": ["pool"]}, "--node-selector 'pool' does not have the form KEY=VALUE"),
        ({"tolerations": ["["]}, "--toleration '[' is not a toleration, such as"),
        ({"tolerations": ["[a]"]}, "--toleration '[a]' is not a toleration, such as"),
        ({"tolerations": ["{keys: a}"]}, "did you mean 'key'?"),
        ({"store_secret": "My Secret"}, "--store-secret 'My Secret' is not a valid Kubernetes"),
        ({"scratch": "50"}, "--scratch '50' is less than 1Mi; write it with its unit"),
        ({"scratch": "big"}, "--scratch 'big' is not a Kubernetes quantity"),
        ({"labels": ["team"]}, "--pod-label 'team' does not have the form KEY=VALUE"),
        ({"labels": ["team=a b"]}, "--pod-label team: 'a b' is not a valid label value"),
        ({"labels": ["a b=c"]}, "--pod-label 'a b' is not a valid label key"),
        ({"labels": ["app.kubernetes.io/name=x"]}, "app.kubernetes.io/name is set by Flotilla"),
        ({"labels": ["pipeline/runid=x"]}, "--pod-label pipeline/runid is set by Flotilla or"),
        ({"variables": ["1A=x"]}, "--env '1A' is not a variable name"),
        ({"variables": ["A"]}, "--env 'A' does not have the form NAME=VALUE"),
        ({"variables": ["AWS_SECRET_ACCESS_KEY=no-x"]}, "is a secret, and the pipeline would"),
        ({"variables": ["KFP_POD_NAME=x"]}, "--env KFP_POD_NAME is set by Flotilla or by KFP"),
        ({"variables": ["A={{x}}"]}, "--env A: KFP does not accept a value that contains {{"),
    ],
)
def test_what_no_pod_can_have_is_one_line(given, said):
    with pytest.raises(ConfigError) as error:
        step_pods(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    # The refusal of a secret does not repeat it.
    assert "no-x" not in str(error.value)
