"""Tests that the generated TFJob is valid for Kubernetes and the operator and has all settings."""

import inspect
import json
import re
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from kubeflow import training

from flotilla.components.image import IMAGE, SECRET_KEYS, PodDefaults
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.engine import document
from flotilla.components.kubernetes.pods.template import Place, leading, pod_template, replicas
from flotilla.components.kubernetes.tfjob import REPLICAS, TFJobs
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from tests.components.kubernetes.settings import configurations
from tests.kubernetes import crd
from tests.kubernetes.admission import ENFORCE, refusal

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("manifest-*.yaml"))
PLACE = Place(namespace="models", service_account="trainer", variables={"AWS_REGION": "eu-1"})


def job_of(config: Config) -> Job:
    return Job(
        config=config, dataset="gs://b/d", checkpoints="gs://b/run-1/checkpoints", workdir=Path()
    )


def made(tree=None, place=PLACE):
    return TFJobs().manifest(job_of(parse_config(tree or {})), place)


def template(tree, role):
    return tree["spec"]["tfReplicaSpecs"][role]["template"]


def container(tree, role):
    return template(tree, role)["spec"]["containers"][0]


def variables(tree, role):
    return {each["name"]: each.get("value") for each in container(tree, role)["env"]}


@pytest.fixture(scope="module")
def schema():
    found = crd.schema("kubeflow.org_tfjobs")
    if not found:
        pytest.skip("the CRD of the training operator is absent: it is not part of Flotilla")
    return found


def without_template_metadata(tree):
    """Remove the `metadata` of the pod templates, which the schema does not describe."""
    copy = json.loads(json.dumps(tree))
    for replica in copy["spec"]["tfReplicaSpecs"].values():
        replica["template"].pop("metadata")
    return copy


def typed(job):
    """Convert a TFJob to the client's typed model and back; unknown keys are dropped."""
    client = training.ApiClient()
    held = client.deserialize(SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1TFJob")
    return client.sanitize_for_serialization(held)


def fails_or_changes(job):
    try:
        return typed(job) != job
    except ValueError:
        return True


@tried(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=configurations)
def test_every_configuration_is_valid_by_the_operators_schema_and_nothing_is_dropped(schema, tree):
    job = made(tree)
    jsonschema.Draft202012Validator(schema).validate(job)
    assert not crd.pruned(without_template_metadata(job), schema)


@tried(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=configurations)
def test_the_operators_typed_models_lose_no_field(tree):
    job = made(tree)
    assert typed(job) == job


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_golden_manifests_fit_the_operators_own_models(path):
    job = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    assert typed(job) == job


def test_the_operators_own_models_see_a_field_that_is_unknown_or_of_another_type():
    job = made()
    for place, key, value in [
        (job["spec"], "cleanPodPolicy", "Running"),
        (job["spec"]["runPolicy"], "backoffLimit", "many"),
        (job["spec"]["tfReplicaSpecs"]["Worker"], "replicas", "2"),
    ]:
        before = dict(place)
        place[key] = value
        assert fails_or_changes(job)
        place.clear()
        place.update(before)
    assert not fails_or_changes(job)


@tried(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=configurations)
def test_every_configuration_meets_the_rules_of_operator_and_kubernetes(tree):
    config = parse_config(tree)
    job = TFJobs().manifest(job_of(config), PLACE)
    counts = replicas(config)
    leader = leading(config)
    assert counts[leader.role] >= 1
    specs = job["spec"]["tfReplicaSpecs"]
    assert {role: specs[REPLICAS[role]]["replicas"] for role in counts} == counts
    assert len(specs) == len(counts)
    for role, count in counts.items():
        pod = f"{job['metadata']['name']}-{role}-{count - 1}"
        assert len(pod) <= 63
        assert pod[0].isalpha()
        own = container(job, REPLICAS[role])
        assert own["name"] == "tensorflow"
        assert own["ports"] == [{"name": "tfjob-port", "containerPort": 2222}]
        mounted = {mount["name"] for mount in own["volumeMounts"]}
        volumes = [volume["name"] for volume in template(job, REPLICAS[role])["spec"]["volumes"]]
        assert mounted == set(volumes)
        assert len(volumes) == len(mounted)
        env_names = [each["name"] for each in own["env"]]
        assert len(set(env_names)) == len(env_names)
    assert job == TFJobs().manifest(job_of(parse_config(tree)), PLACE)


def expanded(text):
    """Expand text as the kubelet does if none of its variables is defined: only `$$` changes."""
    return text.replace("$$", "$")


@pytest.mark.slow
@tried(max_examples=20, deadline=None)
@given(tree=configurations)
def test_a_task_gets_the_configuration_that_was_written(tree):
    job = made(tree)
    for role in job["spec"]["tfReplicaSpecs"]:
        assert parse_config(
            json.loads(expanded(variables(job, role)["FLOTILLA_CONFIG"]))
        ) == parse_config(tree)


def test_text_that_kubernetes_would_expand_arrives_unchanged():
    value = "$(HOME) $$(HOME) $HOME ${HOME}"
    job = made({"cluster": {"kubernetes": {"pod": {"env": {"A": value}, "command": [value]}}}})
    text = variables(job, "Chief")["A"]
    assert "$(" not in text.replace("$$", "")
    assert expanded(text) == value
    assert expanded(container(job, "Chief")["command"][-1]) == value


def test_only_workers_request_gpus_by_any_resource_name():
    job = made({"cluster": {"gpus_per_worker": 2, "kubernetes": {"gpu_resource": "amd.com/gpu"}}})
    assert container(job, "Worker")["resources"] == {"limits": {"amd.com/gpu": "2"}}
    assert "CUDA_VISIBLE_DEVICES" not in variables(job, "Worker")
    for role in ("PS", "Chief"):
        assert "resources" not in container(job, role)
        assert variables(job, role)["CUDA_VISIBLE_DEVICES"] == "-1"


def test_the_settings_of_a_role_override_those_of_all_roles():
    pod = {
        "image": "all",
        "env": {"A": "1", "B": "1"},
        "tolerations": [{"operator": "Exists"}],
        "resources": {"requests": {"cpu": 1}},
    }
    ps = {"image": "ps", "env": {"B": "2"}, "resources": {"requests": {"memory": "1Gi"}}}
    job = made({"cluster": {"kubernetes": {"pod": pod, "ps": ps}}})
    assert [container(job, role)["image"] for role in ("PS", "Worker")] == ["ps", "all"]
    assert {k: variables(job, "PS")[k] for k in "AB"} == {"A": "1", "B": "2"}
    assert container(job, "PS")["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}
    assert template(job, "PS")["spec"]["tolerations"] == [{"operator": "Exists"}]


def test_what_ends_a_job_is_in_its_run_policy():
    settings = {
        "clean_pod_policy": "All",
        "backoff_limit": 0,
        "suspend": True,
        "queue_name": "gpus",
        "scheduling": {"gang": True, "queue": "q", "timeout_seconds": 60},
    }
    job = made({"cluster": {"workers": 4, "kubernetes": {"job": settings}}})
    assert job["spec"]["runPolicy"] == {
        "cleanPodPolicy": "All",
        "ttlSecondsAfterFinished": 86_400,
        "activeDeadlineSeconds": 604_800,
        "backoffLimit": 0,
        "schedulingPolicy": {"minAvailable": 6, "queue": "q", "scheduleTimeoutSeconds": 60},
        "suspend": True,
    }
    assert set(job["spec"]) == {"runPolicy", "tfReplicaSpecs"}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


def test_secrets_are_optional_references():
    kubernetes = {
        "pod": {
            "secret_env": {"AWS_SECRET_ACCESS_KEY": "store/secretkey"},
            "env_from_secrets": ["more"],
            "image_pull_secrets": ["pull"],
        }
    }
    job = made({"cluster": {"kubernetes": kubernetes}})
    for role in job["spec"]["tfReplicaSpecs"]:
        own = container(job, role)
        reference = {"name": "store", "key": "secretkey", "optional": True}
        found = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": reference}}
        assert found in own["env"]
        assert {"secretRef": {"name": "more", "optional": True}} in own["envFrom"]
        assert variables(job, role)["AWS_REGION"] == "eu-1"
        assert template(job, role)["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_a_document_names_a_namespace_only_where_the_configuration_does():
    # `kubectl apply --namespace` rejects a document with a different namespace.
    assert "namespace" not in document(TFJobs(), parse_config({}))["metadata"]
    named = document(TFJobs(), parse_config({"cluster": {"kubernetes": {"namespace": "models"}}}))
    assert named["metadata"]["namespace"] == "models"


def test_istio_injects_no_sidecar_unless_configured():
    assert template(made(), "PS")["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    injected = {"annotations": {"sidecar.istio.io/inject": "true"}}
    job = made({"cluster": {"kubernetes": {"pod": injected}}})
    assert template(job, "PS")["metadata"]["annotations"]["sidecar.istio.io/inject"] == "true"


def test_a_job_and_the_pods_of_every_role_have_the_labels_that_kubernetes_recommends():
    tree = {"cluster": {"evaluator": True, "kubernetes": {"pod": {"labels": {"team": "a"}}}}}
    config = parse_config(tree)
    long = Job(
        config=config, dataset="gs://b/d", checkpoints=f"gs://b/{'run ' * 30}/c", workdir=Path()
    )
    for job in (job_of(config), long):
        tree = TFJobs().manifest(job, PLACE)
        run = names.label_value(job.run_id)
        assert tree["metadata"]["labels"].items() >= names.app_labels("training", run).items()
        for role, name in REPLICAS.items():
            found = template(tree, name)["metadata"]["labels"]
            assert found.items() >= {"team": "a", **names.app_labels(role, run)}.items()
            for value in found.values():
                assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)
    assert names.app_labels("ps", "run-1") == {
        "app.kubernetes.io/name": "flotilla",
        "app.kubernetes.io/part-of": "flotilla",
        "app.kubernetes.io/managed-by": "flotilla",
        "app.kubernetes.io/component": "ps",
        "app.kubernetes.io/instance": "run-1",
        "app.kubernetes.io/version": distribution("kfp-flotilla").version,
    }


def test_without_a_chief_worker_0_leads():
    config = parse_config({"cluster": {"kubernetes": {"chiefless": True}}})
    assert replicas(config) == {"ps": 1, "worker": 2}
    assert str(leading(config)) == "worker-0"
    job = TFJobs().manifest(job_of(config), PLACE)
    # Worker 0 leads the cluster and needs Keras 3.
    assert "TF_USE_LEGACY_KERAS" not in variables(job, "Worker")
    assert variables(job, "PS")["TF_USE_LEGACY_KERAS"] == "1"


def test_the_evaluator_requests_no_gpu_and_does_not_fail_the_job():
    job = made({"cluster": {"evaluator": True, "gpus_per_worker": 1}})
    evaluator = job["spec"]["tfReplicaSpecs"]["Evaluator"]
    assert (evaluator["replicas"], evaluator["restartPolicy"]) == (1, "OnFailure")
    assert "resources" not in container(job, "Evaluator")


def test_a_job_of_one_task_has_a_tf_config_of_its_own():
    # For a job with a single task, the operator does not set TF_CONFIG.
    job = made({"training": {"strategy": "single"}})
    assert list(job["spec"]["tfReplicaSpecs"]) == ["Chief"]
    assert json.loads(variables(job, "Chief")["TF_CONFIG"]) == {
        "cluster": {"chief": ["localhost:2222"]},
        "task": {"type": "chief", "index": 0},
    }
    assert "TF_CONFIG" not in variables(made(), "Chief")


def test_every_setting_of_a_pod_is_used():
    source = Path(inspect.getfile(pod_template)).read_text(encoding="utf-8")
    settings = Config().cluster.kubernetes.pod
    unused = [name for name in type(settings).model_fields if f"pod.{name}" not in source]
    assert unused == ["restart_policy"]


def secrets_of(root, store_secret=None, **pod):
    """Return the secrets and keys that a pod refers to, given the secret of the run's store."""
    defaults = PodDefaults() if store_secret is None else PodDefaults(store_secret=store_secret)
    place = replace(PLACE, defaults=defaults)
    config = parse_config({"cluster": {"kubernetes": {"pod": pod}}})
    job = Job(config=config, dataset="d", checkpoints=f"{root}/r/c", workdir=Path())
    env = container(TFJobs().manifest(job, place), "PS")["env"]
    references = [each["valueFrom"]["secretKeyRef"] for each in env if "valueFrom" in each]
    return {(each["name"], each["key"]) for each in references}


@pytest.mark.parametrize("root", ["minio://b", "s3://bucket"])
def test_a_store_with_credentials_uses_the_secret_of_the_run_unless_another_is_named(root):
    assert secrets_of(root) == {("mlpipeline-minio-artifact", key) for key in SECRET_KEYS}
    ours = {("ours", key) for key in SECRET_KEYS}
    for pod, expected in (
        ({}, ours),
        ({"secret_env": {"AWS_ACCESS_KEY_ID": "own/k"}}, {("own", "k")}),
        ({"env_from_secrets": ["own"]}, set()),
        ({"secret_env": {"TRACKER_KEY": "other/k"}}, {*ours, ("other", "k")}),
        ({"env": {"AWS_ACCESS_KEY_ID": "public"}}, set()),
    ):
        assert secrets_of(root, "ours", **pod) == expected
    assert secrets_of(root, "") == set()


@pytest.mark.parametrize("root", ["gs://bucket", "file:///r"])
def test_another_store_uses_no_secret(root):
    assert secrets_of(root) == set()


def test_the_image_is_that_of_the_run_unless_another_is_named():
    place = replace(PLACE, defaults=PodDefaults(image="ours/flotilla:2"))
    tree = {"cluster": {"kubernetes": {"worker": {"image": "ours/gpu:2"}}}}
    job = made(tree, place)
    assert container(job, "PS")["image"] == container(job, "Chief")["image"] == "ours/flotilla:2"
    assert container(job, "Worker")["image"] == "ours/gpu:2"
    assert container(made(), "PS")["image"] == IMAGE


RESTRICTED = {ENFORCE: "restricted"}
LEAST = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
REQUIRED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def with_pod(**pod):
    return {"cluster": {"evaluator": True, "kubernetes": {"pod": pod}}}


def admitted(job):
    pods = {role: template(job, role) for role in job["spec"]["tfReplicaSpecs"]}
    return {
        role: not refusal({**pod, "metadata": {"name": "x"}}, RESTRICTED)
        for role, pod in pods.items()
    }


def mounted(job, role="Worker"):
    return {mount["mountPath"] for mount in container(job, role)["volumeMounts"]}


def test_by_default_every_pod_is_admitted_with_a_read_only_root():
    job = made(with_pod())
    assert admitted(job) == dict.fromkeys(("Chief", "PS", "Worker", "Evaluator"), True)
    for role in job["spec"]["tfReplicaSpecs"]:
        assert template(job, role)["spec"]["securityContext"] == REQUIRED
        own = container(job, role)["securityContext"]
        assert own == {**LEAST, "readOnlyRootFilesystem": True}
        assert mounted(job, role) == {"/flotilla", "/tmp"}


def test_writable_is_admitted_and_writes_anywhere():
    job = made(with_pod(security="writable"))
    assert all(admitted(job).values())
    assert container(job, "PS")["securityContext"] == LEAST
    assert mounted(job) == {"/flotilla"}


def test_image_leaves_it_to_the_image_and_one_role_may_differ():
    tree = with_pod(security="image")
    tree["cluster"]["kubernetes"]["worker"] = {"security": "restricted"}
    job = made(tree)
    assert admitted(job) == {"Chief": False, "PS": False, "Worker": True, "Evaluator": False}
    assert "securityContext" not in container(job, "PS")
    assert "securityContext" not in template(job, "PS")["spec"]


def test_fields_of_ones_own_are_laid_over_those_of_the_standard():
    job = made(with_pod(security_context={"fsGroup": 2000, "runAsUser": 1234}))
    own = template(job, "PS")["spec"]["securityContext"]
    assert own == {**REQUIRED, "fsGroup": 2000, "runAsUser": 1234}
    alone = made(with_pod(security="image", security_context={"runAsUser": 0}))
    assert template(alone, "PS")["spec"]["securityContext"] == {"runAsUser": 0}


@pytest.mark.parametrize(
    "place",
    [
        {"working_folder": "/tmp"},
        {"volumes": [{"name": "mine", "mount_path": "/tmp", "source": {"emptyDir": {}}}]},
    ],
)
def test_tmp_is_mounted_once(place):
    paths = [
        mount["mountPath"] for mount in container(made(with_pod(**place)), "PS")["volumeMounts"]
    ]
    assert paths.count("/tmp") == 1
