"""Tests that quotas and GPUs are compared with the requests of the job's pods."""

import pytest

from flotilla.pipelines.doctor.resources import amount, format_quantity
from tests.kubernetes.cluster import NAMESPACE

CPU = "cluster.kubernetes.pod.resources.requests.cpu=2"
MEMORY = "cluster.kubernetes.pod.resources.limits.memory=4Gi"
GPU = "cluster.gpus_per_worker=2"


@pytest.fixture
def quota(kube):
    def give(hard, used=None, **spec):
        tree = {
            "metadata": {"name": "team"},
            "spec": {"hard": hard, **spec},
            "status": {"hard": hard, "used": used or {}},
        }
        kube.store.create("resourcequotas", NAMESPACE, tree)

    return give


@pytest.fixture
def node(kube):
    def give(name, labels=None, taints=(), **allocatable):
        has = {key.replace("__", "/").replace("_", "."): n for key, n in allocatable.items()}
        tree = {
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {"taints": list(taints)},
            "status": {"allocatable": {"cpu": "64", **has}},
        }
        kube.store.create("nodes", "", tree)

    return give


@pytest.mark.parametrize(
    ("hard", "used", "found"),
    [
        # The job has a parameter server, a chief and two workers.
        ({"requests.cpu": "10"}, {"requests.cpu": "4"}, ("requests 8, and 4 of 10", '"12"')),
        ({"cpu": "7"}, {}, ("requests 8, and 0 of 7", '"8"')),
        ({"limits.memory": "15Gi"}, {}, ("requests 16Gi, and 0 of 15Gi", '"16Gi"')),
        ({"requests.memory": "16Gi"}, {"requests.memory": "1Mi"}, ("requests 16Gi", '"16385Mi"')),
        # The quota also counts the pod of the step.
        ({"pods": "4"}, {}, ("and its step request 5, and 0 of 4", '"5"')),
        ({"pods": "5"}, {"pods": "2"}, ("and its step request 5, and 2 of 5", '"7"')),
        ({"count/tfjobs.kubeflow.org": "0"}, {}, ("requests 1, and 0 of 0", '"1"')),
        ({"requests.nvidia.com/gpu": "3"}, {}, ("requests 4, and 0 of 3", '"4"')),
        ({"services": "3"}, {}, ("requests 4, and 0 of 3", '"4"')),
    ],
)
def test_a_quota_that_is_too_small(of_job, quota, hard, used, found):
    said, patched = found
    quota(hard, used)
    found = of_job(CPU, MEMORY, GPU)["quota"]
    [key] = hard
    assert found["state"] == "fail"
    assert found["message"].startswith("the quota team is too small")
    assert f"{key}: the job {said}" in found["message"]
    assert f'{{"spec": {{"hard": {{"{key}": {patched}}}}}}}' in found["remedy"]
    assert f"kubectl patch resourcequota team --namespace {NAMESPACE}" in found["remedy"]


@pytest.mark.parametrize(
    ("hard", "used"),
    [
        ({"requests.cpu": "8", "limits.memory": "16Gi", "pods": "5"}, {}),
        ({"requests.storage": "1"}, {}),
        ({"requests.nvidia.com/gpu": "0"}, {}),
        # What is over already and not asked for is no matter.
        ({"configmaps": "3"}, {"configmaps": "5"}),
    ],
)
def test_a_quota_with_room(of_job, quota, hard, used):
    quota(hard, used)
    assert of_job(CPU, MEMORY)["quota"] == {
        "name": "quota", "state": "ok", "remedy": "",
        "message": "there is room for the job in team",
    }  # fmt: skip


def test_the_agent_next_to_a_program_counts(of_job, quota):
    quota({"requests.cpu": "4"})
    program = 'program={"command": ["python", "train.py"], "roles": {"worker": 2}}'
    found = of_job(CPU, program)["quota"]
    assert "requests.cpu: the job requests 4200m, and 0 of 4 are already used" in found["message"]


def test_a_quota_for_some_pods_is_left_out(of_job, quota):
    quota({"pods": "1"}, scopes=["BestEffort"])
    found = of_job()["quota"]
    said = "the quotas team apply only to some pods; this check ignores them"
    assert (found["state"], found["message"]) == ("warn", said)


def nvidia(count, labels=None, **taint):
    return {"labels": labels, "taints": [taint] if taint else (), "nvidia_com__gpu": str(count)}


AMD, OTHER_NAME = {"amd_com__gpu": "8"}, "cluster.kubernetes.gpu_resource=amd.com/gpu"
TEAM = {"key": "team", "value": "b"}
TOLERATIONS = "cluster.kubernetes.worker.tolerations"
SELECTOR = "cluster.kubernetes.worker.node_selector"


@pytest.mark.parametrize(
    ("nodes", "setting", "finding"),
    [
        ([{}], "", ("fail", "; the nodes have no devices; ", "nvidia\\.com/gpu")),
        ([AMD], "", ("fail", "no node has nvidia.com/gpu; the nodes have amd.com/gpu",
         f"flotilla doctor --set {OTHER_NAME}")),
        ([AMD], OTHER_NAME, ("ok", "", "")),
        ([nvidia(1)] * 4, "", ("fail", "2 worker pods request 2 nvidia.com/gpu each; the 4 nodes "
         "that accept them have room for 0 (one node has at most 1)", "")),
        ([nvidia(3)], "", ("fail", "have room for 1", "")),
        ([nvidia(3), nvidia(2)], "", ("ok", "requests 4 of 5", "")),
        ([nvidia(8, **TEAM, effect="NoSchedule")], "", ("fail", "the 0 nodes that accept", "")),
        ([nvidia(8, **TEAM, effect="NoExecute")], "", ("fail", "the 0 nodes that accept", "")),
        ([nvidia(8, **TEAM, effect="NoSchedule")], f"{TOLERATIONS}=[{{key: team, value: b}}]",
         ("ok", "", "")),
        ([nvidia(8, **TEAM, effect="NoExecute")], f"{TOLERATIONS}=[{{key: team, value: c}}]",
         ("fail", "", "")),
        ([nvidia(8, **TEAM, effect="NoExecute")], f"{TOLERATIONS}=[{{operator: Exists}}]",
         ("ok", "", "")),
        # A taint with the name of the resource is tolerated.
        ([nvidia(4, key="nvidia.com/gpu", value="present", effect="NoSchedule")], "",
         ("ok", "", "")),
        ([nvidia(8)], f"{SELECTOR}={{pool: gpu}}", ("fail", "", "")),
        ([nvidia(8), nvidia(4, {"pool": "gpu"})], f"{SELECTOR}={{pool: gpu}}", ("ok", "", "")),
    ],
)  # fmt: skip
def test_the_gpus_of_the_nodes_that_take_the_pods(of_job, node, nodes, setting, finding):
    for number, each in enumerate(nodes):
        node(f"node-{number}", **each)
    report, (state, said, remedy) = of_job(GPU, *filter(None, [setting])), finding
    found = report["GPUs of the cluster"]
    assert report.failed() == (["GPUs of the cluster"] if state == "fail" else [])
    assert found["state"] == state
    assert said in found["message"]
    assert remedy in found["remedy"]


def test_devices_are_looked_for_only_where_a_limit_names_them(of_job, kube, node):
    assert "GPUs of the cluster" not in of_job().states()
    assert not [each for each in kube.server.requests if "nodes" in each]
    node("a")
    limit = "cluster.kubernetes.worker.resources.limits={google.com/tpu: 4}"
    assert of_job(limit).failed() == ["google.com/tpu"]
    node("b", google_com__tpu="8")
    assert of_job(limit)["google.com/tpu"]["state"] == "ok"


def test_a_limit_alone_is_a_request_too(of_job, quota):
    quota({"requests.cpu": "1500m"})
    limits = "cluster.kubernetes.pod.resources.limits.cpu=500m"
    own = "cluster.kubernetes.ps.resources.requests.cpu=0.1"
    said = "requests 1600m, and 0 of 1500m"
    assert said in of_job(limits, own)["quota"]["message"]


@pytest.mark.parametrize(
    ("hard", "said"),
    [
        # The job has a parameter server, a chief and two workers: one Job per task and a shared
        # Service.
        ({"count/jobsets.jobset.x-k8s.io": "0"}, "requests 1, and 0 of 0 are already used"),
        ({"count/jobs.batch": "3"}, "requests 4, and 0 of 3 are already used"),
        ({"count/pods": "3"}, "and its step request 5, and 0 of 3 are already used"),
        ({"services": "0"}, "requests 1, and 0 of 0 are already used"),
        ({"count/leases.coordination.k8s.io": "0"}, "requests 1, and 0 of 0 are already used"),
        ({"count/tfjobs.kubeflow.org": "0", "services": "1"}, ""),
    ],
)
@pytest.mark.usefixtures("jobset")
def test_a_quota_for_jobsets(of_jobset, quota, hard, said):
    quota(hard)
    found = of_jobset()["quota"]
    wanted = f"the quota team is too small: {next(iter(hard))}: the job {said}"
    assert found["message"] == (wanted if said else "there is room for the job in team")


@pytest.mark.parametrize("text", ["0", "1500m", "1", "3Gi", "5Mi", "7Ki", "12", "1001m"])
def test_an_amount_is_written_as_it_was_read_or_rounded_up(text):
    assert format_quantity(amount(text)) == text
    assert amount(format_quantity(amount(text))) == amount(text)
    assert format_quantity(amount("100n")) == "1m"
