"""Tests the checks of the API, the namespace, the job engine and its installation."""

import re
import tomllib

import pytest
from kubernetes.config import kube_config

from flotilla.components.kubernetes.jobset import KIND
from flotilla.pipelines.doctor import cluster
from flotilla.pipelines.doctor.cluster import CONTROLLERS
from tests.conftest import ROOT
from tests.kubernetes.cluster import NAMESPACE
from tests.pipelines.doctor.conftest import IMAGE

CONTROLLER, PLACE = "jobset-controller-manager", "jobset-system"


def test_auto_takes_tfjob_where_it_is_alone_and_nothing_where_neither_is_served(of_auto, kube):
    report = of_auto()
    said = "auto selects tfjob: the cluster serves TFJobs, but no JobSets"
    assert (report["engine"]["message"], report.failed()) == (said, [])
    assert report["TFJob CRD"]["state"] == report["training operator"]["state"] == "ok"
    kube.server.control.kinds.clear()
    report = of_auto()
    assert (report.code, report.failed()) == (1, ["engine"])
    found = report["engine"]
    said = "the cluster serves neither JobSets nor TFJobs: no engine is installed"
    assert found["message"] == said
    assert found["remedy"].startswith("kubectl apply --server-side --filename https://github.com/")
    # If no job is created, there is nothing else to report.
    assert {"admission", "quota", "JobSet CRD", "TFJob CRD"}.isdisjoint(report.states())
    kube.faults.add("GET .*/apis/jobset", 500)
    report = of_auto()
    assert report.failed() == ["engine"]
    assert "does not answer GET /apis/jobset" in report["engine"]["message"]
    kube.faults.down = True
    report = of_auto()
    assert report.failed() == ["Kubernetes API"]
    assert report["engine"]["message"] == "a required check did not succeed: Kubernetes API"


def test_auto_takes_jobset_where_both_are_served(jobset, of_auto):
    assert jobset.jobsets() == []
    report = of_auto("cluster.kubernetes.job.scheduling={gang: true}")
    assert report.failed() == ["engine"]
    assert "auto selects jobset: the cluster serves JobSets; " in report["engine"]["message"]
    assert "cluster.kubernetes.job.scheduling: not supported with" in report["engine"]["message"]
    assert report["engine"]["remedy"] == "flotilla doctor --set cluster.launcher=tfjob"
    report = of_auto()
    assert (report.code, report.failed()) == (0, [])
    found = report["engine"]
    said = "auto selects jobset: the cluster serves JobSets"
    assert (found["state"], found["message"]) == ("ok", said)
    assert report["JobSet CRD"]["state"] == report["JobSet controller"]["state"] == "ok"
    assert "TFJob CRD" not in report.states()
    assert report["storage"]["state"] == "skipped"
    jobset.faults.add("GET .*/apis/jobset", 403)
    # Without permission to check for JobSet, `auto` selects JobSet anyway, and the launcher reports
    # what is missing.
    assert of_auto()["engine"]["message"].startswith("auto selects jobset: ")


def test_without_a_cluster_auto_is_this_machine(kube, of_auto, monkeypatch):
    monkeypatch.delenv("KUBECONFIG")
    report = of_auto()
    assert (report.code, kube.server.requests) == (0, [])
    found = report["engine"]
    said = "because this is not a pod and KUBECONFIG is not set; on a KFP"
    assert (found["state"], said in found["message"]) == ("ok", True)
    said = "cluster.launcher auto selects local here; to check the API anyway, add --kubernetes"
    assert report["Kubernetes API"]["message"] == said
    # A run that is started here writes to this storage root.
    assert report["storage"]["state"] == "ok"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kube.kubeconfig))
    report = of_auto(options=("--kubernetes",))
    said = "auto selects tfjob: the cluster serves TFJobs, but no JobSets; a run started here"
    assert report["engine"]["message"].startswith(said)
    assert report["TFJob CRD"]["state"] == "ok"


def test_the_page_the_packages_and_the_launcher_have_the_same_versions():
    assert f"install {cluster.JOBSET.oldest} or later" in KIND.outdated
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| ([\w. ]+) \| ([\d., ]+) \|$", text, re.MULTILINE)
    assert rows == [
        (part.name, part.oldest or "not known", ", ".join(part.seen)) for part in cluster.PARTS
    ]
    pinned = dict(each.split("==") for each in PROJECT["dependencies"] if "==" in each)
    for package, part in (("kfp", cluster.KFP), ("tensorflow", cluster.TENSORFLOW)):
        assert pinned[package] == f"{part.oldest}.*"
    assert PROJECT["requires-python"] == f">={cluster.PYTHON.oldest}"


@pytest.mark.usefixtures("jobset")
def test_a_local_run_has_the_engine_examined_that_auto_takes(doctor):
    report = doctor(options=("--kubernetes",))
    assert report["engine"]["message"] == (
        "cluster.launcher is local; auto selects jobset: the cluster serves JobSets"
    )
    assert report["JobSet CRD"]["state"] == "ok"


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("tfjob", ("tfjobs.kubeflow.org/v1 is not served: the training operator is missing or",
                   "overlays/standalone?ref=v1.9.4'")),
        ("jobset", ("jobsets.jobset.x-k8s.io/v1alpha2 is not served: the JobSet controller is "
                    "missing or", "/v0.12.0/manifests.yaml")),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "kinds", [{}, {"kubeflow.org/v1": ["notebooks"], "jobset.x-k8s.io/v1alpha1": ["jobsets"]}]
)
def test_without_the_kind(kube, doctor, kinds, launcher, said):
    kube.server.control.kinds = kinds
    report = doctor(f"cluster.launcher={launcher}", IMAGE)
    [name] = report.failed()
    assert name in ("TFJob CRD", "JobSet CRD")
    assert report[name]["message"].startswith(said[0])
    assert report[name]["remedy"].endswith(said[1])
    assert report["admission"]["message"] == f"a required check did not succeed: {name}"


@pytest.mark.usefixtures("kube")
def test_the_operator_is_seen_by_its_deployment_and_its_pods(of_job, kube):
    found = of_job()["training operator"]
    said = "the deployment training-operator in kubeflow is ready"
    assert (found["state"], found["message"]) == ("ok", said)
    kube.install_operator(replicas=0)
    report = of_job()
    found = report["training operator"]
    assert report.failed() == ["training operator"]
    assert found["message"].endswith("kubeflow has no ready pod: no controller handles jobs")
    assert found["remedy"] == "kubectl describe deployment training-operator --namespace kubeflow"
    kube.store.remove("deployments", "kubeflow", "training-operator")
    report = of_job()
    assert report["TFJob CRD"]["state"] == "ok"
    assert report.failed() == ["training operator"]
    found = report["training operator"]
    assert found["message"] == "the cluster has no deployment of the training operator"
    assert found["remedy"].startswith("kubectl apply --server-side --kustomize")


ANOTHER = "registry.example.com/jobset"
OPERATOR = "jobset-operator"


@pytest.mark.parametrize(
    ("place", "name", "image"),
    [
        # These are a release before 0.11, the Helm chart, Kubeflow Trainer, and a vendor's build.
        (PLACE, CONTROLLER, f"{ANOTHER}/jobset:v0.10.1"),
        ("batch", "jobset-controller", "registry.example.com/mirror/js:v0.12.0"),
        ("kubeflow-system", CONTROLLER, f"{ANOTHER}/jobset:v0.12.0"),
        ("vendor", "js", "registry.example.com:5000/jobset/jobset:v0.12.0@sha256:0a"),
        # An operator of the controller is not the controller.
        ("vendor", OPERATOR, f"{ANOTHER}-operator:1"),
    ],
)
def test_a_controller_that_was_installed_in_another_way(of_jobset, jobset, place, name, image):
    jobset.store.remove("deployments", PLACE, CONTROLLER)
    tree = {
        "metadata": {"name": name},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"readyReplicas": 1},
    }
    jobset.store.create("deployments", place, tree)
    found = of_jobset()["JobSet controller"]
    if name == OPERATOR:
        said = "the cluster has no deployment of the JobSet controller"
        assert (found["state"], found["message"]) == ("fail", said)
    else:
        assert found["state"] == "ok"
        assert found["message"].startswith(f"the deployment {name} in {place} is ready")


def test_a_version_that_is_too_old(jobset, of_jobset):
    jobset.install_jobset("v0.8.2")
    report = of_jobset()
    assert report.code == 0
    found = report["JobSet controller"]
    assert (found["state"], found["message"]) == (
        "warn",
        f"the deployment {CONTROLLER} in {PLACE} is ready; Flotilla requires JobSet 0.9 or later",
    )  # fmt: skip


@pytest.fixture
def team(kube):
    """A complete namespace for the instance's steps, different from the kubeconfig's namespace."""
    kube.store.create("serviceaccounts", "team", {"metadata": {"name": "pipeline-runner"}})
    kube.store.create("secrets", "team", {"metadata": {"name": "keys"}})
    kube.server.control.absent.add(NAMESPACE)
    return kube


def looked_into(kube):
    paths = [each.partition("/namespaces/")[2].partition("/")[0] for each in kube.server.requests]
    reviews = [spec["resourceAttributes"]["namespace"] for spec in kube.server.control.reviews]
    return {*paths, *reviews} - {""}


@pytest.mark.parametrize("by", ["--namespace", "-n", "KFP_NAMESPACE"])
def test_the_namespace_of_the_instance_is_the_one_that_is_looked_at(team, of_job, monkeypatch, by):
    options = (by, "team") if by.startswith("-") else ()
    monkeypatch.setenv("KFP_NAMESPACE", "other" if options else "team")
    report = of_job("cluster.kubernetes.pod.env_from_secrets=[keys]", options=options)
    assert (report.code, report.failed()) == (0, [])
    assert report["namespace"]["message"] == "team"
    assert looked_into(team) == {"team"}
    said = report["account of the KFP UI"]["message"]
    assert said.endswith("system:serviceaccount:team:pipeline-runner")


def test_that_of_the_context_is_reported_to_be_that(kube, of_job):
    said = f"{NAMESPACE}, the namespace of the context; --namespace selects another"
    assert of_job()["namespace"]["message"] == said
    assert looked_into(kube) == {NAMESPACE}
    named = of_job(options=("--namespace", NAMESPACE))
    assert named["namespace"]["message"] == NAMESPACE


def test_a_job_of_another_namespace_is_launched_from_that_of_the_steps(team, of_job):
    team.store.create("secrets", "jobs", {"metadata": {"name": "keys"}})
    report = of_job(
        "cluster.kubernetes.namespace=jobs",
        "cluster.kubernetes.pod.env_from_secrets=[keys]",
        options=("--namespace", "team"),
    )
    assert report.failed() == []
    assert report["namespace"]["message"] == "jobs"
    found = report["permissions of the KFP UI account"]["message"]
    assert found.startswith("system:serviceaccount:team:pipeline-runner has all permissions")


@pytest.mark.parametrize("name", ["Team", "a/b", "a b", "-a", "a" * 64, "../nodes"])
def test_what_is_no_namespace(doctor, monkeypatch, name):
    report = doctor(options=(f"--namespace={name}",))
    assert (report.code, report.answer.get("checks")) == (2, None)
    assert f"{name!r} is not the name of a namespace" in report.err
    monkeypatch.setenv("KFP_NAMESPACE", name)
    assert f"{name!r} is not the name of a namespace" in doctor().err


PAGE = ROOT / "docs/reference/versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("launcher", "part"), [("tfjob", cluster.OPERATOR), ("jobset", cluster.JOBSET)]
)
def test_the_newest_controller_that_was_run_is_the_one_to_install(launcher, part):
    assert CONTROLLERS[launcher].part is part
    assert re.search(rf"[/=]v{re.escape(part.seen[-1])}['/]", CONTROLLERS[launcher].install)


@pytest.mark.parametrize(
    ("part", "version", "state", "message"),
    [
        (cluster.KFP, "2.17.0", "ok", "it"),
        (cluster.KFP, "v2.17.0", "ok", "it"),
        (cluster.KFP, "2.18.1", "ok", "it; Flotilla was tested only with 2.17.0"),
        (cluster.KFP, "2.5.0", "warn", "it; Flotilla requires Kubeflow Pipelines 2.17 or later"),
        (cluster.KFP, "dev", "ok", "it"),
        # A patch of a minor version that was run is one that was run.
        (cluster.KUBERNETES, "v1.33.4-gke.1", "ok", "it"),
    ],
)
def test_a_version_is_judged(part, version, state, message):
    found = cluster.judge_version(part, version, "it")
    assert (found.state, found.message) == (state, message)


def test_the_version_of_the_cluster_is_judged(kube, of_job):
    image = {"image": "kubeflow/training-operator:v1.8.1"}
    spec = {"template": {"spec": {"containers": [image]}}}
    kube.store.change(
        "deployments", "kubeflow", "training-operator", lambda tree: tree.update(spec=spec)
    )
    report = of_job(options=("--namespace", NAMESPACE))
    assert report.code == 0
    assert report["training operator"]["state"] == "warn"
    assert "requires training operator 1.9 or later" in report["training operator"]["message"]
    assert "v1.31.4" in report["Kubernetes API"]["message"]
    assert "tested only with 1.33" in report["Kubernetes API"]["message"]
    program = 'program={"command": ["python", "train.py"], "roles": {"worker": 1}}'
    assert of_job(program)["Kubernetes API"]["state"] == "ok"
    kube.server.control.kubernetes = "1.28.9"
    found = of_job(program)["Kubernetes API"]
    assert (found["state"], found["remedy"]) == ("fail", "kubectl version")
    assert "native sidecars, which Kubernetes 1.28 does not have" in found["message"]
    assert of_job()["Kubernetes API"]["state"] == "ok"


def test_a_service_that_has_the_name_of_a_job_is_found(kube, jobset, of_jobset):
    assert jobset is kube
    report = of_jobset()
    assert report["services"]["state"] == "ok"
    name = "digits-0123456789ab"
    owner = {"kind": "JobSet", "name": name, "apiVersion": "jobset.x-k8s.io/v1alpha2", "uid": "1"}
    metadata = {"name": name, "ownerReferences": [owner]}
    kube.store.create("services", NAMESPACE, {"metadata": metadata, "spec": {}})
    kube.store.create("services", NAMESPACE, {"metadata": {"name": "digits-web"}, "spec": {}})
    assert of_jobset()["services"]["state"] == "ok"
    name = "digits-ba9876543210"
    kube.store.create("services", NAMESPACE, {"metadata": {"name": name}, "spec": {}})
    found = of_jobset()["services"]
    assert found["state"] == "fail"
    assert f"the Service {name} has the name of a job of this model" in found["message"]
    assert found["remedy"] == f"kubectl delete service {name} --namespace {NAMESPACE}"
