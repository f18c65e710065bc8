"""A cluster that lacks one thing: the doctor names it, and what mends it."""

from __future__ import annotations

import pytest
import yaml

from components.kubernetes.api.rbac import LAUNCHER, TRAINER, needed
from components.tfjob.manifest import KIND
from pipelines.doctor.engines import EXAMINED
from tests.kubernetes import rbac
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER
from tests.kubernetes.faults import SILENCE
from tests.pipelines.doctor.conftest import RUNNER

OF_THE_CLUSTER = [
    "namespace",
    "TFJob CRD",
    "training operator",
    "admission",
    "permissions of this user",
    "account of the KFP UI",
    "permissions of that account",
    "permissions of the tasks",
    "network policy",
    "quota",
]


def granted(role):
    documents = yaml.safe_load_all(rbac.FILE.read_text(encoding="utf-8"))
    [rules] = [
        each["rules"]
        for each in documents
        if each["kind"] == "Role" and each["metadata"]["name"] == role
    ]
    return {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.usefixtures("kube")
def test_where_nothing_is_wrong_nothing_fails(of_job):
    report = of_job()
    assert (report.code, report.answer["status"], report.failed()) == (0, "done", [])
    states = report.states()
    assert {states[name] for name in [*OF_THE_CLUSTER, "Kubernetes API", "image"]} == {"ok"}
    assert "v1.31.4" in report["Kubernetes API"]["message"]
    assert RUNNER in report["account of the KFP UI"]["message"]
    assert states["storage"] == "skipped"


def test_nothing_is_changed_in_the_cluster(kube, of_job):
    version = kube.store.version()
    of_job("cluster.kubernetes.pod.env_from_secrets=[keys]", "cluster.gpus_per_worker=1")
    assert kube.store.version() == version
    wrote = [each for each in kube.server.requests if not each.startswith("GET")]
    assert wrote
    assert all("reviews" in each or each.endswith("?dryRun=All") for each in wrote)


@pytest.mark.parametrize("role", [LAUNCHER, TRAINER])
def test_the_permissions_are_those_of_the_file(role):
    asked = {
        (each.verb, each.group, each.resource)
        for examined in EXAMINED.values()
        for each in needed(role, examined.kind)
    }
    assert asked == granted(role)


def test_what_is_asked_is_what_the_api_authorizes(kube, of_job):
    of_job()
    asked = {
        (spec["resourceAttributes"]["verb"], spec["resourceAttributes"]["resource"],
         spec["resourceAttributes"].get("subresource", ""), spec["resourceAttributes"]["group"])
        for spec in kube.server.control.reviews
        if spec.get("user") == RUNNER
    }  # fmt: skip
    assert ("get", "pods", "log", "") in asked
    assert ("create", "tfjobs", "", "kubeflow.org") in asked
    # The tasks have no account of their own.
    both = {*needed(LAUNCHER, KIND), *needed(TRAINER, KIND)}
    assert len(asked) == len({(each.verb, each.resource) for each in both})
    groups = {tuple(spec["groups"]) for spec in kube.server.control.reviews if "user" in spec}
    assert groups == {
        ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated")
    }


def test_without_the_kind(kube, of_job):
    kube.server.control.kinds.clear()
    report = of_job()
    assert (report.code, report.failed()) == (1, ["TFJob CRD"])
    assert "tfjobs.kubeflow.org/v1 is not served" in report["TFJob CRD"]["message"]
    assert "training operator is not installed" in report["TFJob CRD"]["message"]
    assert report["TFJob CRD"]["remedy"].startswith("kubectl apply --server-side --kustomize")


def test_with_the_kind_in_another_version_only(kube, of_job):
    kube.server.control.kinds = {"kubeflow.org/v1beta1": ["tfjobs"]}
    assert "only kubeflow.org/v1beta1" in of_job()["TFJob CRD"]["message"]


def test_with_other_kinds_of_the_group_only(kube, of_job):
    kube.server.control.kinds = {"kubeflow.org/v1": ["notebooks"]}
    assert "served without tfjobs" in of_job()["TFJob CRD"]["message"]


def test_without_a_permission_of_the_user(kube, of_job):
    kube.server.control.deny(USER, "create tfjobs", "get pods/log")
    report = of_job()
    assert report.failed() == ["permissions of this user"]
    found = report["permissions of this user"]
    said = f"{USER} may not in {NAMESPACE}: create tfjobs.kubeflow.org, get pods/log"
    assert found["message"] == said
    assert f"kubectl apply --namespace {NAMESPACE} --kustomize deploy/base" in found["remedy"]
    assert f"--role flotilla-launcher --user '{USER}'" in found["remedy"]


def test_without_a_permission_of_the_account(kube, of_job):
    kube.server.control.deny(RUNNER, "delete tfjobs")
    report = of_job()
    # As long as the tasks have no account of their own they use the one that launches.
    assert report.failed() == ["permissions of that account"]
    assert report["permissions of the tasks"]["state"] == "warn"
    found = report["permissions of that account"]
    assert found["message"] == f"{RUNNER} may not in {NAMESPACE}: delete tfjobs.kubeflow.org"
    assert f"--serviceaccount {NAMESPACE}:pipeline-runner" in found["remedy"]


def test_events_are_not_needed(kube, of_job):
    kube.server.control.deny(USER, "list events")
    report = of_job()
    assert (report.code, report["permissions of this user"]["state"]) == (0, "warn")


def test_the_tasks_own_account_is_asked_for(kube, of_job):
    name = "flotilla-trainer"
    kube.server.control.deny(f"system:serviceaccount:{NAMESPACE}:{name}", "delete tfjobs")
    report = of_job(f"cluster.kubernetes.pod.service_account={name}")
    assert report["permissions of the tasks"]["state"] == "warn"
    assert name in report["permissions of the tasks"]["message"]
    found = report["service accounts of tasks"]
    assert (found["state"], found["message"]) == ("fail", f"not there in {NAMESPACE}: {name}")
    assert found["remedy"] == (
        f"kubectl apply --namespace {NAMESPACE} --kustomize deploy/base && "
        f"kubectl create rolebinding {name}-{name} --namespace {NAMESPACE} --role {name} "
        f"--serviceaccount {NAMESPACE}:{name}"
    )


def test_who_may_not_ask_for_others_is_reported_how_to(kube, of_job):
    kube.faults.add("/subjectaccessreviews", 403)
    report = of_job()
    assert report.code == 0
    found = report["permissions of that account"]
    assert (found["state"], RUNNER in found["message"]) == ("warn", True)
    assert found["remedy"] == (
        f"kubectl auth can-i create tfjobs.kubeflow.org --namespace {NAMESPACE} --as {RUNNER}"
    )


def test_an_account_of_another_namespace(kube, of_job):
    kube.store.create("serviceaccounts", "kubeflow", {"metadata": {"name": "robot"}})
    report = of_job(options=("--service-account", "kubeflow:robot"))
    assert "system:serviceaccount:kubeflow:robot" in report["account of the KFP UI"]["message"]
    users = {spec.get("user") for spec in kube.server.control.reviews}
    assert users == {None, "system:serviceaccount:kubeflow:robot"}


def test_without_the_account_that_of_a_profile_is_proposed(kube, of_job):
    kube.store.delete("serviceaccounts", NAMESPACE, "pipeline-runner")
    assert of_job()["account of the KFP UI"]["remedy"].startswith("kubectl get serviceaccounts")
    kube.store.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "default-editor"}})
    report = of_job()
    assert report.failed() == ["account of the KFP UI"]
    remedy = report["account of the KFP UI"]["remedy"]
    assert remedy == "flotilla doctor --service-account default-editor"


@pytest.mark.parametrize("text", ["a:b:c", ":a", "a:", "a b", "a/b"])
def test_what_is_no_account(doctor, text):
    report = doctor(options=("--service-account", text))
    assert report.code == 2
    assert "write it as NAME or NAMESPACE:NAME" in report.err


def test_without_the_namespace(kube, of_job):
    kube.server.control.absent.add(NAMESPACE)
    report = of_job()
    assert report.failed() == ["namespace"]
    assert report["namespace"]["remedy"] == f"kubectl create namespace {NAMESPACE}"


def test_an_expired_token(kube, of_job):
    kube.faults.add("", 401)
    report = of_job()
    assert report.failed() == ["Kubernetes API"]
    assert "does not know the caller, or no longer" in report["Kubernetes API"]["message"]
    assert report["Kubernetes API"]["remedy"] == "kubectl auth whoami"
    assert {report.states()[name] for name in OF_THE_CLUSTER} == {"skipped"}
    assert report["quota"]["message"] == "it needs Kubernetes API"
    assert "a-token" not in str(report)


def test_an_api_that_allows_nothing(kube, of_job):
    kube.faults.add("", 403)
    report = of_job("cluster.gpus_per_worker=1", "cluster.kubernetes.pod.priority_class=high")
    assert (report.code, report.failed()) == (1, ["permissions of this user"])
    states = report.states()
    others = [name for name in OF_THE_CLUSTER if name != "permissions of this user"]
    also = ["Kubernetes API", "GPUs of the cluster", "priority classes"]
    assert {states[name] for name in [*others, *also]} == {"warn"}
    assert all(each["remedy"] for each in report.answer["checks"] if each["state"] == "warn")


def test_an_api_that_is_not_there(kube, of_job):
    kube.faults.down = True
    report = of_job()
    assert report.failed() == ["Kubernetes API"]
    assert "does not answer GET /version" in report["Kubernetes API"]["message"]
    assert report["Kubernetes API"]["remedy"] == "kubectl cluster-info"


def test_something_else_at_its_address(kube, of_job):
    kube.faults.add("/version", 404)
    report = of_job()
    assert "is no Kubernetes API" in report["Kubernetes API"]["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_timeout")
@pytest.mark.parametrize("silent", ["/version", "/selfsubjectaccessreviews"])
def test_an_api_that_hangs_holds_up_nothing_else(kube, of_job, silent):
    kube.faults.add(silent, SILENCE)
    report = of_job()
    name = "Kubernetes API" if silent == "/version" else "permissions of this user"
    assert report.failed() == [name]
    assert "timed out" in report[name]["message"]
    assert report["loopback"]["state"] == "ok"
    if silent != "/version":
        assert report["quota"]["state"] == "ok"


def test_an_api_that_fails_for_one_question(kube, of_job):
    kube.faults.add("/resourcequotas", 500)
    report = of_job()
    assert report.failed() == ["quota"]
    assert "HTTP 500" in report["quota"]["message"]


def test_without_a_kubeconfig(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    report = doctor(options=("--kubernetes",))
    assert report.failed() == ["Kubernetes API"]
    assert report["Kubernetes API"]["remedy"] == "kubectl config get-contexts"


@pytest.mark.parametrize("text", ["{", "- a", "users: 5", "", "a: [b"])
def test_a_kubeconfig_that_is_none(doctor, tmp_path, monkeypatch, text):
    (tmp_path / "config").write_text(text, encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    report = doctor(options=("--kubernetes",))
    assert report.failed() == ["Kubernetes API"]
    assert "the check itself" not in report["Kubernetes API"]["message"]


def test_the_cluster_is_left_alone_when_the_launcher_is_local(kube, doctor):
    report = doctor()
    assert (report.code, kube.server.requests) == (0, [])
    assert report["Kubernetes API"]["state"] == "skipped"
    assert "--kubernetes" in report["Kubernetes API"]["message"]


def test_the_cluster_is_looked_at_on_demand(kube, doctor):
    assert doctor(options=("--kubernetes",))["TFJob CRD"]["state"] == "ok"
    assert kube.server.requests
