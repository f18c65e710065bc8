"""What the job names and the cluster lacks."""

from __future__ import annotations

import json

import hypothesis
import pytest
from hypothesis import given

from pipelines.doctor.engines import EXAMINED
from pipelines.doctor.named_objects import named
from tests.components.kubernetes import settings
from tests.kubernetes.cluster import NAMESPACE
from trainer.config.load import parse_config

POD = "cluster.kubernetes.pod"
SECRET = "hush-hush"


@pytest.fixture
def there(kube):
    """Create an object of the namespace."""

    def create(kind, name, **tree):
        kube.store.create(kind, NAMESPACE, {"metadata": {"name": name}, **tree})

    return create


def test_a_secret_that_is_missing(of_job, there):
    setting = f"{POD}.secret_env={{KEY: store/access, OTHER: store/secret}}"
    report = of_job(setting)
    assert (report.code, report.failed()) == (1, ["secrets"])
    assert report["secrets"]["message"] == f"not there in {NAMESPACE}: store"
    assert report["secrets"]["remedy"] == (
        f"kubectl create secret generic store --namespace {NAMESPACE} "
        "--from-literal=access=VALUE --from-literal=secret=VALUE"
    )
    there("secrets", "store", data={"access": SECRET, "secret": SECRET})
    report = of_job(setting)
    assert (report["secrets"]["state"], report["secrets"]["message"]) == ("ok", "store")
    assert SECRET not in json.dumps(report.answer)


def test_a_secret_without_its_key(of_job, there):
    there("secrets", "store", data={"access": SECRET})
    report = of_job(f"{POD}.secret_env={{KEY: store/access, OTHER: store/secret}}")
    assert report["secrets"]["message"] == f"not there in {NAMESPACE}: store (without secret)"
    assert report["secrets"]["remedy"].startswith(
        f"kubectl patch secret store --namespace {NAMESPACE}"
    )
    assert '{"secret": "VALUE"}' in report["secrets"]["remedy"]
    assert SECRET not in str(report)


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
        # Those keys are for KFP's own store alone.
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
    assert report[STORE]["message"].startswith(f"{KFP_SECRET} is not there: a role")
    assert STORE not in report.failed()


VOLUME = "volumes=[{name: v, mount_path: /v, source: "


@pytest.mark.parametrize(
    ("setting", "kind", "found"),
    [
        ("env_from_secrets=[a]", "secrets", ("secrets", "create secret generic a")),
        ("env_from_config_maps=[a]", "configmaps", ("config maps", "create configmap a")),
        ("image_pull_secrets=[a]", "secrets",
         ("image pull secrets", "create secret docker-registry a")),
        ("service_account=a", "serviceaccounts",
         ("service accounts of tasks", "create serviceaccount a")),
        (VOLUME + "{persistentVolumeClaim: {claimName: a}}}]", "persistentvolumeclaims",
         ("volume claims", '"kind":"PersistentVolumeClaim"')),
        (VOLUME + "{secret: {secretName: a}}}]", "secrets",
         ("secrets", "create secret generic a")),
        (VOLUME + "{configMap: {name: a}}}]", "configmaps", ("config maps", "create configmap a")),
    ],
)  # fmt: skip
def test_whatever_a_pod_names(of_job, there, setting, kind, found):
    title, remedy = found
    report = of_job(f"{POD}.{setting}")
    assert report.failed() == [title]
    assert report[title]["message"] == f"not there in {NAMESPACE}: a"
    assert remedy in report[title]["remedy"]
    there(kind, "a")
    assert of_job(f"{POD}.{setting}").failed() == []


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
    assert report[title]["message"] == f"not there in {NAMESPACE}: a"
    there(kind, "a")
    assert of_job(options=option).failed() == []


def test_who_may_not_look_is_reported_so(of_job, kube):
    kube.faults.add("/secrets/", 403)
    report = of_job(f"{POD}.env_from_secrets=[a]")
    assert (report.code, report["secrets"]["state"]) == (0, "warn")
    assert report["secrets"]["remedy"] == f"kubectl get secrets a --namespace {NAMESPACE}"


@hypothesis.settings(max_examples=20, deadline=None)
@given(settings.configurations)
def test_of_any_settings_all_that_is_named_is_found(tree):
    config = parse_config(tree)
    job = EXAMINED["tfjob"].plan(config)
    found = {each.name for each in named(job)}
    for role in (each.name.lower() for each in job.roles):
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
