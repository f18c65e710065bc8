"""The doctor examines JobSet, as it does the training operator."""

from __future__ import annotations

import pytest

from tests.kubernetes import crd
from tests.kubernetes.admission import ENFORCE
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER
from tests.kubernetes.jobset_api import CRD
from tests.kubernetes.store import RefusedError
from tests.pipelines.doctor.conftest import IMAGE, RUNNER

CONTROLLER, PLACE = "jobset-controller-manager", "jobset-system"
OF_THE_CLUSTER = [
    "namespace",
    "JobSet CRD",
    "JobSet controller",
    "admission",
    "permissions of this user",
    "account of the KFP UI",
    "permissions of that account",
    "permissions of the tasks",
    "network policy",
    "quota",
]
# Kueue names its webhook as JobSet does, by its source; the words are those of the API server.
KUEUE_IS_AWAY = (
    'Internal error occurred: failed calling webhook "mjobset.kb.io": failed to call webhook: Post '
    '"https://kueue-webhook-service.kueue-system.svc:443/mutate-jobset-x-k8s-io-v1alpha2-jobset'
    '?timeout=10s": no endpoints available for service "kueue-webhook-service"'
)
with_schema = pytest.mark.skipif(
    not (crd.FOLDER / f"{CRD}.yaml").is_file(), reason="the CRD of JobSet is not here"
)


@pytest.fixture
def kube(kube):
    """A cluster with JobSet, and without the training operator."""
    kube.server.control.kinds.clear()
    kube.install_jobset()
    return kube


@pytest.fixture
def of_job(doctor):
    """Call the doctor for a JobSet that stores nothing of its own."""

    def call(*settings, options=()):
        return doctor("cluster.launcher=jobset", IMAGE, *settings, options=options)

    return call


@pytest.fixture
def deployment(kube):
    """Have the controller be another deployment than that of a release."""

    def give(place, name, image, labels=None, ready=1):
        kube.store.remove("deployments", PLACE, CONTROLLER)
        containers = [{"image": image}]
        tree = {
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {"template": {"spec": {"containers": containers}}},
            "status": {"readyReplicas": ready} if ready else {},
        }
        kube.store.create("deployments", place, tree)

    return give


@pytest.mark.usefixtures("kube")
def test_where_nothing_is_wrong_nothing_fails(of_job):
    report = of_job("cluster.evaluator=true")
    assert (report.code, report.answer["status"], report.reasons()) == (0, "done", {})
    states = report.states()
    assert {states[name] for name in [*OF_THE_CLUSTER, "Kubernetes API", "image"]} == {"ok"}
    assert report["JobSet CRD"]["message"] == "jobsets.jobset.x-k8s.io/v1alpha2 is served"
    said = f"the deployment {CONTROLLER} in {PLACE} is ready"
    assert report["JobSet controller"]["message"] == said
    assert (states["storage"], "TFJob CRD" in states, "engine" in states) == (
        "skipped", False, False,
    )  # fmt: skip


def test_nothing_is_changed_in_the_cluster(kube, of_job):
    version = kube.store.version()
    of_job("cluster.gpus_per_worker=1")
    assert kube.store.version() == version
    wrote = [each for each in kube.server.requests if not each.startswith("GET")]
    assert all("reviews" in each or each.endswith("dryRun=All") for each in wrote)
    assert any("/jobsets?fieldValidation=Strict&dryRun=All" in each for each in wrote)
    assert not any("tfjobs" in each for each in kube.server.requests)


def test_without_the_kind(kube, of_job):
    kube.server.control.kinds.clear()
    report = of_job()
    assert report.failed() == ["JobSet CRD"]
    found = report["JobSet CRD"]
    assert found["message"] == (
        "jobsets.jobset.x-k8s.io/v1alpha2 is not served: the JobSet controller is not installed"
    )
    assert found["remedy"].endswith("/v0.12.0/manifests.yaml")
    assert report["admission"]["message"] == "it needs JobSet CRD"
    assert report["JobSet controller"]["state"] == "skipped"


def test_with_the_kind_in_another_version_only(kube, of_job):
    kube.server.control.kinds = {"jobset.x-k8s.io/v1alpha1": ["jobsets"]}
    assert "only jobset.x-k8s.io/v1alpha1" in of_job()["JobSet CRD"]["message"]


@with_schema
def test_a_kind_that_is_too_old_for_a_field(kube, of_job):
    kube.install_jobset(lacks=["spec.network.publishNotReadyAddresses"])
    report = of_job()
    assert report.failed() == ["admission"]
    found = report["admission"]
    assert found["message"] == (
        "the JobSet of this cluster is too old for spec.network.publishNotReadyAddresses: install "
        "0.12.0, or leave the setting out that makes it"
    )
    assert found["remedy"].endswith("/v0.12.0/manifests.yaml")


def test_a_controller_without_a_pod_does_not_answer_either(kube, of_job):
    kube.install_jobset(replicas=0)
    report = of_job()
    assert report.failed() == ["JobSet controller", "admission"]
    found = report["JobSet controller"]
    assert found["message"].endswith(f"in {PLACE} has no ready pod: nobody takes up a job")
    assert found["remedy"] == f"kubectl describe deployment {CONTROLLER} --namespace {PLACE}"
    found = report["admission"]
    said = "the JobSet controller does not answer, so that no job can be made: Internal error"
    assert found["message"].startswith(said)
    assert "mjobset.kb.io" in found["message"]
    assert found["remedy"] == (
        "kubectl get deployments --all-namespaces --selector app.kubernetes.io/name=jobset"
    )


def test_a_webhook_of_kueue_is_not_taken_for_that_of_jobset(kube, of_job):
    def refuse(kind, _tree):
        if kind == "jobsets":
            raise RefusedError(500, "InternalError", KUEUE_IS_AWAY)

    kube.store.webhooks.append(refuse)
    report = of_job()
    assert report.failed() == ["admission"]
    assert report["admission"]["message"].startswith("Kueue does not answer, so that no job")
    assert report["admission"]["remedy"] == "kubectl get deployments --namespace kueue-system"


def test_a_version_that_is_too_old(kube, of_job):
    kube.install_jobset("v0.8.2")
    report = of_job()
    assert report.code == 0
    found = report["JobSet controller"]
    assert (found["state"], found["message"]) == (
        "warn", f"the deployment {CONTROLLER} in {PLACE} is ready; JobSet has to be 0.9 or later",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("place", "name", "image"),
    [
        # Releases before 0.11, the chart, Kubeflow Trainer, and a vendor's.
        (PLACE, CONTROLLER, "registry.example.com/jobset/jobset:v0.10.1"),
        ("batch", "jobset-controller", "registry.example.com/mirror/js:v0.12.0"),
        ("kubeflow-system", CONTROLLER, "registry.example.com/jobset/jobset:v0.12.0"),
        ("vendor", "js", "registry.example.com:5000/jobset/jobset:v0.12.0@sha256:0a"),
    ],
)
def test_a_controller_that_was_installed_in_another_way(of_job, deployment, place, name, image):
    deployment(place, name, image, {"app.kubernetes.io/name": "deployment"})
    found = of_job()["JobSet controller"]
    assert found["state"] == "ok"
    assert found["message"].startswith(f"the deployment {name} in {place} is ready")


def test_an_operator_of_the_controller_is_not_the_controller(kube, of_job, deployment):
    deployment("vendor", "jobset-operator", "registry.example.com/jobset-operator:1")
    kube.faults.add("POST .*dryRun", 403)
    found = of_job()["JobSet controller"]
    assert found["message"] == "no deployment of the cluster is that of a JobSet controller"
    assert found["state"] == "fail"


def test_where_only_its_own_namespace_may_be_read(kube, of_job):
    kube.faults.add("GET /apis/apps/v1/deployments", 403)
    said = f"the deployment {CONTROLLER} in {PLACE} is ready"
    assert of_job()["JobSet controller"]["message"] == said


def test_where_no_deployment_may_be_read_its_webhook_shows_it(kube, of_job):
    kube.faults.add("/deployments", 403)
    found = of_job()["JobSet controller"]
    assert (found["state"], found["message"]) == (
        "ok", "its webhook answers; its version is not seen",
    )  # fmt: skip
    # Who may try no job has the other ones of the namespace.
    kube.faults.add("POST .*dryRun", 403)
    found = of_job()["JobSet controller"]
    said = f"{NAMESPACE} has no JobSet of the last day"
    assert (found["state"], said in found["message"]) == ("warn", True)


def test_other_jobs_show_whether_it_runs(kube, of_job):
    kube.jobset_controller.down = True
    kube.faults.add("/deployments", 403)
    kube.faults.add("POST .*dryRun", 403)
    kube.store.create("jobsets", NAMESPACE, {"metadata": {"name": "old"}, "spec": {}})

    def change(created, **status):
        def to(tree):
            tree["metadata"]["creationTimestamp"] = created or tree["metadata"]["creationTimestamp"]
            tree["status"] = status

        kube.store.change("jobsets", NAMESPACE, "old", to)

    jobs = [{"name": "chief", "ready": 1}]
    # A JobSet that runs has no condition.
    change("", replicatedJobsStatus=jobs)
    found = of_job()["JobSet controller"]
    assert (found["state"], found["message"][:28]) == ("ok", "it has taken up the job old ")
    change("2020-01-01T00:00:00Z", replicatedJobsStatus=jobs)
    assert "of the last day" in of_job()["JobSet controller"]["message"]
    change("2020-01-01T00:00:00Z")
    found = of_job()["JobSet controller"]
    assert found["message"] == (
        "the job old of 2020-01-01 00:00:00+00:00 has no status: no JobSet controller runs, or it "
        "cannot make the pods"
    )


def test_permissions_of_the_launcher(kube, of_job):
    kube.server.control.deny(USER, "create jobsets", "delete jobs")
    report = of_job()
    assert report.failed() == ["permissions of this user"]
    found = report["permissions of this user"]
    said = f"{USER} may not in {NAMESPACE}: create jobsets.jobset.x-k8s.io, delete jobs.batch"
    assert found["message"] == said
    assert "--role flotilla-launcher" in found["remedy"]


def test_without_deleting_jobs_a_run_goes_on(kube, of_job):
    kube.server.control.deny(RUNNER, "delete jobs")
    report = of_job()
    assert (report.code, report.failed()) == (0, [])
    assert report["permissions of that account"]["state"] == "warn"
    assert report["permissions of that account"]["message"].endswith(": delete jobs.batch")


def test_permissions_of_the_tasks(kube, of_job):
    kube.server.control.deny(RUNNER, "watch leases")
    report = of_job()
    found = report["permissions of the tasks"]
    assert (found["state"], found["message"]) == (
        "warn", f"{RUNNER} may not in {NAMESPACE}: watch leases.coordination.k8s.io",
    )  # fmt: skip


QUEUE = ("cluster.kubernetes.job.queue_name=gpus", "cluster.kubernetes.job.suspend=true")


def test_a_queue_of_kueue(kube, of_job):
    kube.server.control.install_kueue("batch/job", "jobset.x-k8s.io/jobset")
    report = of_job(*QUEUE)
    assert report.failed() == ["Kueue"]
    assert report["Kueue"]["message"] == f"there is no local queue gpus in {NAMESPACE}"
    kube.store.create("localqueues", NAMESPACE, {"metadata": {"name": "gpus"}})
    assert of_job(QUEUE[0])["Kueue"]["message"] == "the job waits in gpus"
    # Its settings say the same where a job may not be tried.
    kube.faults.add("POST .*dryRun", 403)
    assert of_job(QUEUE[0])["Kueue"]["state"] == "ok"


def test_kueue_that_does_not_look_after_jobsets(kube, of_job):
    kube.server.control.install_kueue("batch/job", "kubeflow.org/tfjob")
    kube.store.create("localqueues", NAMESPACE, {"metadata": {"name": "gpus"}})
    report = of_job(*QUEUE)
    assert report.failed() == ["Kueue"]
    assert report["Kueue"]["message"] == (
        "Kueue does not look after JobSets (jobset.x-k8s.io/jobset is not among its frameworks): "
        "the job stays suspended for ever"
    )
    assert "does not wait for its quota" in of_job(QUEUE[0])["Kueue"]["message"]


@pytest.mark.usefixtures("kube")
def test_without_kueue(of_job):
    report = of_job(*QUEUE)
    assert report.failed() == ["Kueue"]
    assert "it waits until someone resumes it" in report["Kueue"]["message"]


def test_pods_that_pod_security_refuses(kube, of_job):
    kube.store.labels[NAMESPACE] = {ENFORCE: "restricted"}
    report = of_job("cluster.kubernetes.worker.security=image")
    assert report.failed() == ["admission"]
    assert report["admission"]["message"].startswith(f"{NAMESPACE} refuses a worker pod: pods ")


@pytest.mark.parametrize(
    ("hard", "said"),
    [
        # A parameter server, a chief and two workers: a Job each, and one service of all.
        ({"count/jobsets.jobset.x-k8s.io": "0"}, "requests 1, 0 of 0 are used"),
        ({"count/jobs.batch": "3"}, "requests 4, 0 of 3 are used"),
        ({"pods": "3"}, "requests 4, 0 of 3 are used"),
        ({"count/pods": "3"}, "requests 4, 0 of 3 are used"),
        ({"services": "0"}, "requests 1, 0 of 0 are used"),
        ({"count/leases.coordination.k8s.io": "0"}, "requests 1, 0 of 0 are used"),
        ({"requests.nvidia.com/gpu": "1"}, "requests 2, 0 of 1 are used"),
    ],
)
def test_a_quota_that_is_too_small(kube, of_job, hard, said):
    tree = {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": {"hard": hard}}
    kube.store.create("resourcequotas", NAMESPACE, tree)
    found = of_job("cluster.gpus_per_worker=1")["quota"]
    [key] = hard
    assert found["state"] == "fail"
    assert found["message"] == f"the quota team is too small: {key}: the job {said}"


def test_a_quota_with_room(kube, of_job):
    hard = {
        "count/jobsets.jobset.x-k8s.io": "1", "count/jobs.batch": "4", "pods": "4", "services": "1",
        "count/tfjobs.kubeflow.org": "0",
    }  # fmt: skip
    tree = {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": {"hard": hard}}
    kube.store.create("resourcequotas", NAMESPACE, tree)
    report = of_job()
    assert (report["quota"]["message"], report.failed()) == ("room for the job in team", [])


@pytest.fixture
def of_policies(kube, of_job):
    """Call the doctor in a namespace with these policies, and return its finding."""

    def call(*specs):
        kube.store.remove("networkpolicies", NAMESPACE, "flotilla-training")
        for number, spec in enumerate(specs):
            tree = {"metadata": {"name": f"policy-{number}"}, "spec": spec}
            kube.store.create("networkpolicies", NAMESPACE, tree)
        return of_job()["network policy"]

    return call


def test_policies_by_the_labels_of_jobset(of_policies):
    role = "jobset.sigs.k8s.io/replicatedjob-name"
    found = of_policies({"podSelector": {"matchLabels": {role: "worker"}}})
    assert (found["state"], "selects chief, ps: any pod" in found["message"]) == ("warn", True)


@pytest.mark.parametrize(
    ("port", "state"), [("grpc", "warn"), (2222, "warn"), ("tfjob-port", "ok"), (80, "ok")]
)
def test_policies_by_the_name_of_the_port(of_policies, port, state):
    rule = {"ports": [{"port": port}]}
    assert of_policies({"podSelector": {}, "ingress": [rule]})["state"] == state


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("cluster.kubernetes.job.scheduling={gang: true}", "cluster.kubernetes.job.scheduling"),
        ("cluster.kubernetes.job.clean_pod_policy=All", "cluster.kubernetes.job.clean_pod_policy"),
        ("cluster.kubernetes.ps.restart_policy=Always", "cluster.kubernetes.ps.restart_policy"),
    ],
)
@pytest.mark.usefixtures("kube")
def test_settings_that_only_tfjobs_have(of_job, setting, key):
    report = of_job(setting)
    assert "configuration" in report.failed()
    assert report["configuration"]["message"].startswith(f"{key}: ")
    assert report["configuration"]["remedy"] == "flotilla doctor --set 'cluster.launcher=tfjob'"


@pytest.mark.usefixtures("kube")
def test_settings_of_this_machine(of_job):
    report = of_job("cluster.in_process=true")
    assert "configuration" in report.failed()
    said = "cluster.in_process: not with cluster.launcher jobset"
    assert report["configuration"]["message"] == said


def test_an_api_that_allows_nothing(kube, of_job):
    kube.faults.add("", 403)
    report = of_job("cluster.gpus_per_worker=1")
    assert (report.code, report.failed()) == (1, ["permissions of this user"])
    others = [name for name in OF_THE_CLUSTER if name != "permissions of this user"]
    assert {report.states()[name] for name in others} == {"warn"}
