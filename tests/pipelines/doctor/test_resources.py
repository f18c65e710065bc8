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
    assert (found["state"], found["message"].startswith("the quota team is too small")) == (
        "fail", True,
    )  # fmt: skip
    assert f"{key}: the job {said}" in found["message"]
    assert f'{{"spec": {{"hard": {{"{key}": {patched}}}}}}}' in found["remedy"]
    assert f"kubectl patch resourcequota team --namespace {NAMESPACE}" in found["remedy"]


@pytest.mark.parametrize(
    "hard",
    [
        {"requests.cpu": "8", "limits.memory": "16Gi", "pods": "5"},
        {"requests.storage": "1"},
        {"requests.nvidia.com/gpu": "0"},
    ],
)
def test_a_quota_with_room(of_job, quota, hard):
    quota(hard)
    assert of_job(CPU, MEMORY)["quota"] == {
        "name": "quota", "state": "ok", "remedy": "",
        "message": "there is room for the job in team",
    }  # fmt: skip


def test_the_agent_next_to_a_program_counts(of_job, quota):
    quota({"requests.cpu": "4"})
    program = 'program={"command": ["python", "train.py"], "roles": {"worker": 2}}'
    found = of_job(CPU, program)["quota"]
    assert "requests.cpu: the job requests 4200m, and 0 of 4 are already used" in found["message"]


def test_what_is_over_already_and_not_asked_for_is_no_matter(of_job, quota):
    quota({"configmaps": "3"}, {"configmaps": "5"})
    assert of_job()["quota"]["state"] == "ok"


def test_a_quota_for_some_pods_is_left_out(of_job, quota):
    quota({"pods": "1"}, scopes=["BestEffort"])
    found = of_job()["quota"]
    assert (found["state"], found["message"]) == (
        "warn", "the quotas team apply only to some pods; this check ignores them",
    )  # fmt: skip


def test_gpus_under_another_name(of_job, node):
    node("a", amd_com__gpu="8")
    report = of_job(GPU)
    found = report["GPUs of the cluster"]
    assert report.failed() == ["GPUs of the cluster"]
    assert "no node has nvidia.com/gpu; the nodes have amd.com/gpu" in found["message"]
    assert found["remedy"].endswith("--set cluster.kubernetes.gpu_resource=amd.com/gpu")
    renamed = of_job(GPU, "cluster.kubernetes.gpu_resource=amd.com/gpu")
    assert renamed["GPUs of the cluster"]["state"] == "ok"


def test_no_gpus_at_all(of_job, node):
    node("a")
    found = of_job(GPU)["GPUs of the cluster"]
    assert "; the nodes have no devices; " in found["message"]
    assert "nvidia\\.com/gpu" in found["remedy"]


def test_nodes_with_too_few_gpus_each(of_job, node):
    for name in "abcd":
        node(name, nvidia_com__gpu="1")
    found = of_job(GPU)["GPUs of the cluster"]
    assert found["state"] == "fail"
    assert "2 worker pods request 2 nvidia.com/gpu each" in found["message"]
    assert "have room for 0 (one node has at most 1)" in found["message"]


def test_too_few_gpus_in_all(of_job, node):
    node("a", nvidia_com__gpu="3")
    assert "have room for 1" in of_job(GPU)["GPUs of the cluster"]["message"]
    node("b", nvidia_com__gpu="2")
    found = of_job(GPU)["GPUs of the cluster"]
    assert (found["state"], "requests 4 of 5" in found["message"]) == ("ok", True)


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_only_nodes_that_take_the_pods_count(of_job, node, effect):
    taint = {"key": "team", "value": "b", "effect": effect}
    node("a", nvidia_com__gpu="8", taints=[taint])
    assert "the 0 nodes that accept them" in of_job(GPU)["GPUs of the cluster"]["message"]
    tolerates = "cluster.kubernetes.worker.tolerations=[{key: team, value: b}]"
    assert of_job(GPU, tolerates)["GPUs of the cluster"]["state"] == "ok"
    other = "cluster.kubernetes.worker.tolerations=[{key: team, value: c}]"
    assert of_job(GPU, other)["GPUs of the cluster"]["state"] == "fail"
    everything = "cluster.kubernetes.worker.tolerations=[{operator: Exists}]"
    assert of_job(GPU, everything)["GPUs of the cluster"]["state"] == "ok"


def test_a_taint_called_as_the_gpu_is_tolerated(of_job, node):
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    node("a", nvidia_com__gpu="4", taints=[taint])
    assert of_job(GPU)["GPUs of the cluster"]["state"] == "ok"


def test_nodes_are_selected_by_their_labels(of_job, node):
    node("a", nvidia_com__gpu="8")
    select = "cluster.kubernetes.worker.node_selector={pool: gpu}"
    assert of_job(GPU, select)["GPUs of the cluster"]["state"] == "fail"
    node("b", {"pool": "gpu"}, nvidia_com__gpu="4")
    assert of_job(GPU, select)["GPUs of the cluster"]["state"] == "ok"


def test_without_gpus_nobody_looks_for_them(of_job, kube):
    assert "GPUs of the cluster" not in of_job().states()
    assert not [each for each in kube.server.requests if "nodes" in each]


def test_another_device_of_the_limits_is_looked_for_too(of_job, node):
    node("a")
    limit = "cluster.kubernetes.worker.resources.limits={google.com/tpu: 4}"
    report = of_job(limit)
    assert report.failed() == ["google.com/tpu"]
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
def test_an_amount_is_written_as_it_was_read(text):
    assert format_quantity(amount(text)) == text
    assert amount(format_quantity(amount(text))) == amount(text)


def test_what_is_too_fine_is_rounded_up():
    assert format_quantity(amount("100n")) == "1m"
