"""Tests the checks for objects that the job refers to but the cluster lacks."""

import json

import hypothesis
import pytest
from hypothesis import given

from flotilla.components.image import IMAGE
from flotilla.components.launchers import engine
from flotilla.pipelines.doctor.cluster import plan
from flotilla.pipelines.doctor.resources import image_names, judge_images, list_named_objects
from flotilla.trainer.config.load import parse_config
from tests.components.kubernetes import settings
from tests.kubernetes.cluster import NAMESPACE

POD = "cluster.kubernetes.pod"
SECRET = "hush-hush"


@pytest.fixture
def there(kube):
    def create(kind, name, **tree):
        kube.store.create(kind, NAMESPACE, {"metadata": {"name": name}, **tree})

    return create


def test_a_secret_that_is_missing_or_lacks_a_key(of_job, kube, there):
    setting = f"{POD}.secret_env={{KEY: store/access, OTHER: store/secret}}"
    report = of_job(setting)
    assert (report.code, report.failed()) == (1, ["secrets"])
    assert report["secrets"]["message"] == f"missing in {NAMESPACE}: store"
    assert report["secrets"]["remedy"] == (
        f"kubectl create secret generic store --namespace {NAMESPACE} "
        "--from-literal=access=VALUE --from-literal=secret=VALUE"
    )
    there("secrets", "store", data={"access": SECRET})
    report = of_job(setting)
    assert report["secrets"]["message"] == f"missing in {NAMESPACE}: store (without secret)"
    patch = f"kubectl patch secret store --namespace {NAMESPACE}"
    assert report["secrets"]["remedy"].startswith(patch)
    assert '{"secret": "VALUE"}' in report["secrets"]["remedy"]
    assert SECRET not in str(report)
    kube.store.remove("secrets", NAMESPACE, "store")
    there("secrets", "store", data={"access": SECRET, "secret": SECRET})
    report = of_job(setting)
    assert (report["secrets"]["state"], report["secrets"]["message"]) == ("ok", "store")
    assert SECRET not in json.dumps(report.answer)


KFP_SECRET = "mlpipeline-minio-artifact"
KFP_ROOT = "storage.root=minio://mlpipeline/flotilla?endpoint=127.0.0.1:1&disableSSL=true"
STORE = "secret of the store"
KFP_PAIR = {"accesskey": SECRET, "secretkey": SECRET}
BOTO_PAIR = {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.mark.parametrize(
    ("root", "data", "expected"),
    [
        (KFP_ROOT, KFP_PAIR, "ok"),
        (KFP_ROOT, BOTO_PAIR, "ok"),
        (KFP_ROOT, {"accesskey": SECRET}, "warn"),
        ("storage.root=s3://bucket/k", BOTO_PAIR, "ok"),
        # These keys give access only to KFP's own store.
        ("storage.root=s3://bucket/k", KFP_PAIR, "warn"),
    ],
)
def test_the_secret_of_the_store_needs_one_whole_pair(of_job, there, root, data, expected):
    there("secrets", KFP_SECRET, data=data)
    report = of_job(root)
    assert report[STORE]["state"] == expected
    assert "secrets" not in report.failed()
    assert "patch" not in str(report[STORE])
    assert SECRET not in json.dumps(report.answer)


@pytest.mark.usefixtures("kube")
def test_without_the_secret_of_the_store_a_role_has_to_open_it(of_job):
    report = of_job(KFP_ROOT)
    assert report[STORE]["state"] == "warn"
    assert report[STORE]["message"].startswith(f"the secret {KFP_SECRET} does not exist: the pods")
    assert STORE not in report.failed()


VOLUMES = (
    "{name: v0, mount_path: /v0, source: {persistentVolumeClaim: {claimName: a}}}, "
    "{name: v1, mount_path: /v1, source: {secret: {secretName: a}}}, "
    "{name: v2, mount_path: /v2, source: {configMap: {name: a}}}"
)
NAMING = (
    "env_from_secrets=[b]", "env_from_config_maps=[b]", "image_pull_secrets=[a]",
    "service_account=a", f"volumes=[{VOLUMES}]",
)  # fmt: skip
FOUND = {
    "secrets": ("a, b", "create secret generic a"),
    "config maps": ("a, b", "create configmap a"),
    "image pull secrets": ("a", "create secret docker-registry a"),
    "service accounts of tasks": ("a", "create serviceaccount a"),
    "volume claims": ("a", '"kind":"PersistentVolumeClaim"'),
}


def test_whatever_a_pod_names(of_job, there):
    settings = [f"{POD}.{each}" for each in NAMING]
    report = of_job(*settings)
    assert set(report.failed()) == set(FOUND)
    for title, (missing, remedy) in FOUND.items():
        assert report[title]["message"] == f"missing in {NAMESPACE}: {missing}", title
        assert remedy in report[title]["remedy"], title
    for kind in ("secrets", "configmaps"):
        there(kind, "b")
    for kind in ("secrets", "configmaps", "serviceaccounts", "persistentvolumeclaims"):
        there(kind, "a")
    assert of_job(*settings).failed() == []


@pytest.mark.parametrize(
    "setting", [f"{POD}.priority_class=high", "cluster.kubernetes.job.scheduling"]
)
def test_a_priority_class(of_job, kube, setting):
    if setting.endswith("scheduling"):
        setting = f"{setting}={{gang: true, priority_class: high}}"
    report = of_job(setting)
    assert report.failed() == ["priority classes"]
    assert report["priority classes"]["remedy"] == "kubectl create priorityclass high --value=1000"
    kube.store.create("priorityclasses", "", {"metadata": {"name": "high"}})
    assert of_job(setting).failed() == []


def test_a_queue_of_kueue(of_job, kube, there):
    queue = "cluster.kubernetes.job.queue_name=gpus"
    # The queue is missing both without Kueue and after the loop has installed Kueue.
    for _ in range(2):
        report = of_job(queue, "cluster.kubernetes.job.suspend=true")
        assert report.failed() == ["Kueue queues"]
        assert report["Kueue queues"]["message"] == f"missing in {NAMESPACE}: gpus"
        kube.server.control.install_kueue()
    there("localqueues", "gpus")
    assert of_job(queue).failed() == []
    report = of_job("cluster.kubernetes.job.suspend=true")
    assert "without a Kueue queue" in report["configuration"]["message"]


@pytest.mark.parametrize(
    ("option", "kind", "title"),
    [
        (("--pull-secret", "a"), "secrets", "image pull secrets of the steps"),
        (("--mount", "a:/data"), "persistentvolumeclaims", "volume claims of the steps"),
    ],
)
def test_what_the_pods_of_the_steps_name(of_job, there, option, kind, title):
    report = of_job(options=option)
    assert report.failed() == [title]
    assert report[title]["message"] == f"missing in {NAMESPACE}: a"
    there(kind, "a")
    assert of_job(options=option).failed() == []


def test_who_may_not_look_is_reported_so(of_job, kube):
    kube.faults.add("/secrets/", 403)
    report = of_job(f"{POD}.env_from_secrets=[a]")
    assert (report.code, report["secrets"]["state"]) == (0, "warn")
    assert report["secrets"]["remedy"] == f"kubectl get secrets --namespace {NAMESPACE}"


@hypothesis.settings(max_examples=8, deadline=None)
@given(settings.configurations)
def test_of_any_settings_all_that_is_named_is_found(tree):
    config = parse_config(tree)
    job = plan(engine("tfjob"), config)
    found = {each.name for each in list_named_objects(job)}
    for role in (each.name for each in job.roles):
        pod = config.cluster.kubernetes.of(role)
        said = {*pod.image_pull_secrets, *pod.env_from_secrets, *pod.env_from_config_maps}
        said |= {each.partition("/")[0] for each in pod.secret_env.values()}
        said |= {pod.service_account, pod.priority_class} - {""}
        said |= {each.source["persistentVolumeClaim"]["claimName"] for each in pod.volumes}
        assert said <= found


@pytest.mark.parametrize("source", ["{secret: 5}", "{configMap: {}}", "{nfs: {path: /x}}"])
def test_a_volume_of_any_form_is_no_trouble(of_job, kube, source):
    assert kube.jobs() == []
    setting = f"{POD}.volumes=[{{name: v, mount_path: /v, source: {source}}}]"
    assert of_job(setting).failed() == []


JOB = "cluster.launcher=tfjob"
OURS = "registry.example.com/flotilla:1"


@pytest.mark.parametrize(
    ("image", "state"),
    [
        ("flotilla:1", "warn"),
        ("team/flotilla:1", "warn"),
        ("localhost:5000/flotilla:1", "ok"),
        ("registry.example.com/flotilla@sha256:" + "a" * 64, "ok"),
    ],
)
def test_images(doctor, image, state):
    config = parse_config({"cluster": {"kubernetes": {"pod": {"image": image}}}})
    found = judge_images(image_names(plan(engine("tfjob"), config)))
    assert found.state == state
    assert found.remedy or state == "ok"
    # The steps have the image whatever the launcher is.
    assert doctor(options=("--image", image))["image"]["state"] == state
    assert "image" not in doctor().states()


@pytest.mark.usefixtures("kube")
def test_where_a_role_names_no_image_it_is_said_what_to_give(doctor):
    report = doctor(JOB)
    found = report["image"]
    assert (report.failed(), found["state"]) == ([], "warn")
    assert found["message"] == (
        "no image is given: pass the image of the uploaded pipeline with --image, or set "
        f"cluster.kubernetes.pod.image; the default image, {IMAGE}, is not in a registry"
    )
    assert found["remedy"] == "flotilla doctor --image HOST/NAME:TAG"
    report = doctor(JOB, f"cluster.kubernetes.worker.image={OURS}")
    assert report["image"]["message"].startswith("no image is given: ")
    roles = [f"cluster.kubernetes.{role}.image={OURS}" for role in ("chief", "ps", "worker")]
    assert (report["image"]["state"], doctor(JOB, *roles)["image"]["message"]) == ("warn", OURS)


@pytest.mark.usefixtures("kube")
def test_the_given_image_is_that_of_all_that_name_none(doctor, of_job):
    report = doctor(JOB, options=("--image", IMAGE))
    said = (
        "the image name contains no registry, so a node that does not have the image pulls it "
        "from Docker Hub: "
    )
    assert (report["image"]["state"], report["image"]["message"]) == ("warn", f"{said}{IMAGE}")
    named = doctor(JOB, f"cluster.kubernetes.pod.image={IMAGE}")["image"]
    assert named["message"] == f"{said}{IMAGE}"
    assert doctor(options=("--image", IMAGE))["image"]["message"] == f"{said}{IMAGE}"
    report = doctor(JOB, options=("--image", OURS))
    assert (report["image"]["state"], report["image"]["message"]) == ("ok", OURS)
    worker = "registry.example.com/workers:2"
    report = doctor(JOB, f"cluster.kubernetes.worker.image={worker}", options=("--image", OURS))
    assert report["image"]["message"] == f"{OURS}, {worker}"
    # The given image is judged even where all tasks name another one.
    found = of_job(options=("--image", "flotilla:1"))["image"]
    assert (found["state"], found["message"]) == ("warn", f"{said}flotilla:1")
    assert found["remedy"].endswith("&& flotilla doctor --image HOST/NAME:TAG")
