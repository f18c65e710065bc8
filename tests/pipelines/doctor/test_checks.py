"""Tests that the doctor reports each required object that a cluster lacks, with a fix."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from flotilla.components.kubernetes.jobset import KIND as JOBSET
from flotilla.components.kubernetes.requirements import LAUNCHER, TRAINER, required_rules
from flotilla.components.kubernetes.tfjob import KIND
from flotilla.pipelines.doctor.checks import _answers
from flotilla.trainer.tracking import addresses, mlflow_run, promotions
from flotilla.trainer.tracking.promotions import Hub
from tests.kubernetes import rbac
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER
from tests.kubernetes.faults import SILENCE
from tests.pipelines.doctor.conftest import RUNNER
from tests.trainer.tracking import test_promotions as hub_server

CONTROLLERS = {"TFJob": "training operator", "JobSet": "JobSet controller"}
OF_THE_CLUSTER = [
    "namespace", "admission", "permissions of this user", "account of the KFP UI",
    "permissions of the KFP UI account", "permissions of the tasks", "quota",
]  # fmt: skip


@pytest.mark.parametrize("role", [LAUNCHER, TRAINER])
def test_the_permissions_are_those_of_the_file(role):
    [rules] = [
        each["rules"]
        for each in yaml.safe_load_all(rbac.FILE.read_text(encoding="utf-8"))
        if each["kind"] == "Role" and each["metadata"]["name"] == role
    ]
    granted = {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {
        (each.verb, each.group, each.resource)
        for kind in (KIND, JOBSET)
        for each in required_rules(role, kind)
    }
    assert asked == granted


@pytest.mark.parametrize("kind", ["TFJob", "JobSet"])
@pytest.mark.usefixtures("jobset")
def test_where_nothing_is_wrong_nothing_fails(of_job, of_jobset, kind):
    report = (of_job if kind == "TFJob" else of_jobset)("cluster.evaluator=true")
    assert (report.code, report.answer["status"], report.failed()) == (0, "done", [])
    states = report.states()
    own = [f"{kind} CRD", CONTROLLERS[kind]]
    assert {states[name] for name in [*OF_THE_CLUSTER, *own, "Kubernetes API", "image"]} == {"ok"}
    assert "v1.31.4" in report["Kubernetes API"]["message"]
    assert RUNNER in report["account of the KFP UI"]["message"]
    assert states["storage"] == "skipped"


def test_nothing_is_changed_in_the_cluster(jobset, of_job, of_jobset):
    kube = jobset
    version = kube.store.version()
    of_job("cluster.kubernetes.pod.env_from_secrets=[keys]", "cluster.gpus_per_worker=1")
    assert kube.store.version() == version
    wrote = [each for each in kube.server.requests if not each.startswith("GET")]
    assert wrote
    assert all("reviews" in each or each.endswith("dryRun=All") for each in wrote)
    of_jobset("cluster.gpus_per_worker=1")
    assert kube.store.version() == version
    strict = "/jobsets?fieldValidation=Strict&dryRun=All"
    assert any(strict in each for each in kube.server.requests)


def test_what_is_asked_is_what_the_api_authorizes(kube, of_job):
    of_job()
    asked = {
        tuple(spec["resourceAttributes"].get(key, "") for key in ("verb", "resource", "subresource",
                                                                  "group"))
        for spec in kube.server.control.reviews
        if spec.get("user") == RUNNER
    }  # fmt: skip
    assert {("get", "pods", "log", ""), ("create", "tfjobs", "", "kubeflow.org")} <= asked
    # The tasks have no service account, so the launcher's account needs the permissions of both
    # roles.
    both = {*required_rules(LAUNCHER, KIND), *required_rules(TRAINER, KIND)}
    assert len(asked) == len({(each.verb, each.resource) for each in both})
    groups = {tuple(spec["groups"]) for spec in kube.server.control.reviews if "user" in spec}
    named = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}")
    assert groups == {(*named, "system:authenticated")}


@pytest.mark.parametrize(
    ("denied", "state", "lacking"),
    [
        ((USER, "create tfjobs", "get pods/log"), "fail",
         "create tfjobs.kubeflow.org, get pods/log"),
        # Events are not needed.
        ((USER, "list events"), "warn", "list events"),
        ((RUNNER, "delete tfjobs"), "fail", "delete tfjobs.kubeflow.org"),
    ],
)  # fmt: skip
def test_without_a_permission(kube, of_job, denied, state, lacking):
    kube.server.control.deny(*denied)
    who = denied[0]
    report = of_job()
    name = "permissions of this user" if who == USER else "permissions of the KFP UI account"
    found = report[name]
    assert report.failed() == ([name] if state == "fail" else [])
    assert (report.code, found["state"]) == (int(state == "fail"), state)
    assert found["message"] == f"{who} lacks permissions in {NAMESPACE}: {lacking}"
    account = f"--user '{USER}'" if who == USER else f"--serviceaccount {NAMESPACE}:pipeline-runner"
    apply = f"kubectl apply --namespace {NAMESPACE} --kustomize deploy/base"
    assert all(each in found["remedy"] for each in (apply, "--role flotilla-launcher", account))
    # Tasks without a service account use the launcher's account.
    assert report["permissions of the tasks"]["state"] == ("ok" if who == USER else "warn")


def test_permissions_of_a_jobset(jobset, of_jobset):
    jobset.server.control.deny(RUNNER, "delete jobs", "watch leases")
    report = of_jobset()
    # A run works without these permissions.
    assert (report.code, report.failed()) == (0, [])
    assert report["permissions of the KFP UI account"]["message"].endswith(": delete jobs.batch")
    found = report["permissions of the tasks"]
    assert (found["state"], found["message"]) == (
        "warn", f"{RUNNER} lacks permissions in {NAMESPACE}: watch leases.coordination.k8s.io",
    )  # fmt: skip


def test_the_tasks_own_account_is_asked_for(kube, of_job):
    name = "flotilla-trainer"
    kube.server.control.deny(f"system:serviceaccount:{NAMESPACE}:{name}", "delete tfjobs")
    report = of_job(f"cluster.kubernetes.pod.service_account={name}")
    assert report["permissions of the tasks"]["state"] == "warn"
    assert name in report["permissions of the tasks"]["message"]
    found = report["service accounts of tasks"]
    assert (found["state"], found["message"]) == ("fail", f"missing in {NAMESPACE}: {name}")
    assert found["remedy"] == (
        f"kubectl apply --namespace {NAMESPACE} --kustomize deploy/base && "
        f"kubectl create rolebinding {name}-{name} --namespace {NAMESPACE} --role {name} "
        f"--serviceaccount {NAMESPACE}:{name}"
    )


def test_an_account_of_another_namespace(kube, of_job):
    kube.store.create("serviceaccounts", "kubeflow", {"metadata": {"name": "robot"}})
    report = of_job(options=("--service-account", "kubeflow:robot"))
    assert "system:serviceaccount:kubeflow:robot" in report["account of the KFP UI"]["message"]
    users = {spec.get("user") for spec in kube.server.control.reviews}
    assert users == {None, "system:serviceaccount:kubeflow:robot"}


def test_without_the_namespace(kube, of_job):
    kube.server.control.absent.add(NAMESPACE)
    report = of_job()
    assert report.failed() == ["namespace"]
    assert report["namespace"]["remedy"] == f"kubectl create namespace {NAMESPACE}"


@pytest.mark.parametrize(
    ("fault", "name", "finding"),
    [
        (("", 401), "Kubernetes API",
         ("fail", "does not accept the credentials", "kubectl auth whoami")),
        (("/version", 404), "Kubernetes API", ("fail", "is not a Kubernetes API", "kubectl")),
        (("/resourcequotas", 500), "quota", ("fail", "/resourcequotas", "kubectl describe")),
        (("/subjectaccessreviews", 403), "permissions of the KFP UI account", ("warn", RUNNER,
         f"kubectl auth can-i create tfjobs.kubeflow.org --namespace {NAMESPACE} --as {RUNNER}")),
        (("/deployments", 403), "training operator", ("warn", "whether the controller runs",
         "kubectl get deployments --all-namespaces --selector")),
        (("POST .*/pods", 403), "admission", ("warn",
         f"whether the namespace {NAMESPACE} admits a ps pod: pods is",
         f"kubectl auth can-i create pods --namespace {NAMESPACE}")),
    ],
)  # fmt: skip
def test_a_request_that_the_api_refuses(kube, of_job, fault, name, finding):
    kube.faults.add(*fault)
    report, (state, said, remedy) = of_job(), finding
    assert (report.code, report.failed()) == ((1, [name]) if state == "fail" else (0, []))
    assert report[name]["state"] == state
    assert said in report[name]["message"]
    assert report[name]["remedy"].startswith(remedy)
    if name == "Kubernetes API":
        assert {report.states()[each] for each in OF_THE_CLUSTER} == {"skipped"}
        assert report["quota"]["message"] == "a required check did not succeed: Kubernetes API"
    assert "a-token" not in str(report)


def test_an_api_that_allows_nothing_or_is_not_there(kube, of_job):
    kube.faults.add("", 403)
    report = of_job("cluster.gpus_per_worker=1", "cluster.kubernetes.pod.priority_class=high")
    assert (report.code, report.failed()) == (1, ["permissions of this user"])
    states = report.states()
    others = [name for name in OF_THE_CLUSTER if name != "permissions of this user"]
    also = ["Kubernetes API", "GPUs of the cluster", "priority classes"]
    assert {states[name] for name in [*others, *also]} == {"warn"}
    assert all(each["remedy"] for each in report.answer["checks"] if each["state"] == "warn")
    kube.faults.down = True
    report = of_job()
    assert report.failed() == ["Kubernetes API"]
    assert "does not answer GET /version" in report["Kubernetes API"]["message"]
    assert report["Kubernetes API"]["remedy"] == "kubectl cluster-info"


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


@pytest.mark.parametrize("text", [None, "{", "- a", "users: 5", "", "a: [b"])
def test_a_kubeconfig_that_is_none(doctor, tmp_path, monkeypatch, text):
    if text is not None:
        (tmp_path / "config").write_text(text, encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    report = doctor(options=("--kubernetes",))
    assert report.failed() == ["Kubernetes API"]
    assert "the check itself" not in report["Kubernetes API"]["message"]
    assert report["Kubernetes API"]["remedy"] == "kubectl config get-contexts"


def test_the_cluster_is_looked_at_on_demand_alone_when_the_launcher_is_local(kube, doctor):
    report = doctor()
    assert (report.code, kube.server.requests) == (0, [])
    assert report["Kubernetes API"]["state"] == "skipped"
    assert "--kubernetes" in report["Kubernetes API"]["message"]
    assert doctor(options=("--kubernetes",))["TFJob CRD"]["state"] == "ok"
    assert kube.server.requests


class Instance(ThreadingHTTPServer):
    """A server that returns one document for every GET; `closed` maps paths to error statuses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.answer: dict[str, object] = {"tag_name": "2.17.0", "multi_user": False}
        self.asked: list[str] = []
        self.paths: list[str] = []
        self.closed: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Authorization", ""))
        self.server.paths.append(self.path)
        text = json.dumps(self.server.answer).encode()
        path = self.path.partition("?")[0]
        self.send_response(self.server.closed.get(path, self.server.status))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def asked(doctor, instance):
    """Return a function that calls the doctor with an instance; its report, and what it found."""

    def ask(*options):
        report = doctor(options=("--endpoint", instance.url, *options))
        return report, report["KFP instance"]

    return ask


def test_an_instance_reports_its_version_or_keeps_it_for_itself(
    doctor, asked, instance, monkeypatch
):
    report, found = asked()
    assert (report.code, found["state"]) == (0, "ok")
    assert found["message"] == f"{instance.url} is KFP 2.17.0"
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", instance.url)
    assert doctor()["KFP instance"]["state"] == "ok"
    instance.answer = {}
    found = asked()[1]
    remedy = f"curl --include {instance.url}/apis/v2beta1/healthz"
    assert (found["state"], found["remedy"]) == ("warn", remedy)


EXPERIMENTS = "/apis/v2beta1/experiments"


def test_an_instance_for_several_users_wants_a_namespace_of_the_user(asked, instance, monkeypatch):
    instance.answer = {"tag_name": "2.17.0", "multi_user": True}
    report, found = asked()
    assert report.failed() == ["KFP instance"]
    said = f"{instance.url} is a multi-user instance: add --namespace, or set KFP_NAMESPACE"
    assert found["message"] == said
    assert found["remedy"] == "flotilla doctor --namespace NAMESPACE"
    assert not [path for path in instance.paths if path.startswith(EXPERIMENTS)]
    monkeypatch.setenv("KFP_NAMESPACE", "team")
    assert asked()[1]["state"] == "ok"
    assert asked("--namespace", "mine")[1]["message"] == f"{instance.url} is KFP 2.17.0, in mine"
    first, second = [path for path in instance.paths if path.startswith(EXPERIMENTS)]
    assert ("namespace=team" in first, "namespace=mine" in second) == (True, True)
    instance.closed[EXPERIMENTS] = 403
    report, found = asked("-n", "theirs")
    assert report.failed() == ["KFP instance"]
    assert "but denies the request: add --namespace" in found["message"]
    # A single-user instance refuses requests that name a namespace, so none may be sent.
    instance.answer["multi_user"], instance.closed[EXPERIMENTS] = False, 400
    report, found = asked("--namespace", "kubeflow")
    assert (report.code, found["message"]) == (0, f"{instance.url} is KFP 2.17.0")


@pytest.mark.parametrize("status", [401, 403, 500])
def test_an_instance_that_refuses_is_sent_a_token_that_is_never_printed(
    asked, instance, tmp_path, status
):
    (tmp_path / "token").write_text("ey-secret", encoding="utf-8")
    instance.status = status
    report, found = asked("--token-file", str(tmp_path / "token"))
    assert set(instance.asked) == {"Bearer ey-secret"}
    assert "ey-secret" not in str(report)
    report, found = asked()
    assert report.failed() == ["KFP instance"]
    assert str(status) in found["message"]
    assert found["remedy"].startswith("curl --include")


def test_without_a_valid_endpoint_the_option_is_named(doctor):
    report = doctor(options=("--endpoint", "ftp://kfp"))
    assert (report.code, report.failed()) == (1, ["KFP instance"])
    assert "is not the URL of a KFP instance" in report["KFP instance"]["message"]
    found = doctor()["KFP instance"]
    assert (found["state"], "add --endpoint" in found["message"]) == ("skipped", True)


AWAY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv(promotions.TOKEN_FILE, raising=False)


def test_trackers_are_checked_only_where_they_are_named(doctor, monkeypatch):
    monkeypatch.setenv(addresses.URI, AWAY)
    monkeypatch.delenv(addresses.HUB, raising=False)
    found = doctor()
    assert "model registry" not in found.states()
    assert found["MLflow"]["state"] == "warn"
    assert found.code == 0
    message = found["MLflow"]["message"]
    assert f"{AWAY}/health does not respond: ConnectionError" in message
    assert message.endswith("a run continues without this server")


def test_a_registry_that_answers_and_one_that_is_away():
    with hub_server.serving() as (address, store):
        found = _answers(Hub(address).check)
        assert found.state == "ok"
        assert f"the model registry responds at {address}" in found.message
        store.fault = lambda _verb, _path: (401, {"message": "who are you"})
        found = _answers(Hub(address).check)
        assert (found.state, "401 who are you" in found.message) == ("warn", True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(addresses.URI, address)
            found = _answers(mlflow_run.health)
    assert found.state == "warn"
    assert "returns 401; check MLFLOW_TRACKING_URI" in found.message
    assert _answers(Hub(AWAY).check).state == "warn"


@pytest.mark.parametrize("address", ["http://", "https://[::1", "http://user:secret@127.0.0.1:1"])
def test_an_address_that_is_none_is_a_warning_without_its_password(monkeypatch, address):
    monkeypatch.setenv(addresses.URI, address)
    found = _answers(mlflow_run.health)
    assert found.state == "warn"
    assert "secret" not in found.message
    assert "\n" not in found.message
