"""Tests that the generated JobSet is valid for Kubernetes and JobSet and has one Job per task."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from flotilla.components.kubernetes import adoption, names
from flotilla.components.kubernetes.jobset import JobSets
from flotilla.components.kubernetes.pods.template import Place, leading, replicas
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Task, from_tf_config
from tests.components.kubernetes.settings import configurations
from tests.kubernetes import crd, job_validation, jobset_webhook
from tests.kubernetes.test_jobsets import NEVER_AGAIN

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("jobset-*.yaml"))
PLACE = Place(namespace="models", service_account="trainer", variables={"AWS_REGION": "eu-1"})


def fitting(drawn):
    """Remove the settings that `JobSets.check` rejects, and set `cluster.evaluator` as drawn."""
    tree, evaluator = copy.deepcopy(drawn[0]), drawn[1]
    tree["cluster"] |= {"evaluator": evaluator, "launcher": "jobset"}
    kubernetes = tree["cluster"]["kubernetes"]
    for key in ("scheduling", "clean_pod_policy"):
        kubernetes.get("job", {}).pop(key, None)
    for role in ("pod", "chief", "ps", "worker", "evaluator"):
        kubernetes.get(role, {}).pop("restart_policy", None)
    return tree


settings_of_jobsets = st.tuples(configurations, st.booleans()).map(fitting)


def job_of(config: Config) -> Job:
    return Job(
        config=config, dataset="gs://b/d", checkpoints="gs://b/run-1/checkpoints", workdir=Path()
    )


def made(tree=None, place=PLACE):
    return JobSets().manifest(job_of(parse_config(tree or {})), place)


def roles_of(tree):
    return {each["name"]: each for each in tree["spec"]["replicatedJobs"]}


def template(tree, role):
    return roles_of(tree)[role]["template"]["spec"]["template"]


def container(tree, role):
    return template(tree, role)["spec"]["containers"][0]


def expanded(tree, role, index):
    """Return a task's environment variables, expanded in order as the kubelet does."""
    known: dict[str, str] = {}

    def replace(match):
        return "$" if match[0] == "$$" else known.get(match[1], match[0])

    for each in container(tree, role)["env"]:
        path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if path:
            assert path == "metadata.labels['jobset.sigs.k8s.io/job-index']"
            known[each["name"]] = str(index)
        elif "value" in each:
            known[each["name"]] = re.sub(r"\$\$|\$\(([^)]+)\)", replace, each["value"])
    return known


@pytest.fixture(scope="module")
def schema():
    found = crd.schema("jobset.x-k8s.io_jobsets")
    if not found:
        pytest.skip("the CRD of JobSet is absent: it is not part of Flotilla")
    return found


def refuse_what_kubernetes_refuses(job):
    """Raise the error that JobSet's webhook or the Jobs API would return for a JobSet."""
    held = jobset_webhook.defaulted(copy.deepcopy(job))
    for role in held["spec"]["replicatedJobs"]:
        role.setdefault("groupName", "default")
    jobset_webhook.check_created(held)
    for name, role in roles_of(held).items():
        child = {"metadata": {"name": name}, "spec": role["template"]["spec"]}
        job_validation.check(job_validation.defaulted(child))


@tried(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=settings_of_jobsets)
def test_every_configuration_is_valid_by_the_schema_of_jobset_and_no_field_is_unknown(schema, tree):
    job = made(tree)
    jsonschema.Draft202012Validator(schema).validate(job)
    assert not crd.invalid(job, schema)
    assert crd.pruned(copy.deepcopy(job), schema) == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_golden_manifests_are_valid_by_the_schema_of_jobset(schema, path):
    job = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    assert not crd.invalid(job, schema)
    assert crd.pruned(copy.deepcopy(job), schema) == []


def test_the_schema_sees_a_field_that_is_unknown(schema):
    job = made()
    job["spec"]["replicatedJobs"][0]["template"]["spec"]["runPolicy"] = {}
    assert crd.pruned(job, schema) == ["spec.replicatedJobs[0].template.spec.runPolicy"]


@tried(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=settings_of_jobsets)
def test_every_configuration_meets_the_rules_of_jobset_and_kubernetes(tree):
    config = parse_config(tree)
    JobSets().check(config)
    job = JobSets().manifest(job_of(config), PLACE)
    refuse_what_kubernetes_refuses(job)
    roles, name = roles_of(job), job["metadata"]["name"]
    assert {role: each["replicas"] for role, each in roles.items()} == replicas(config)
    assert job["spec"]["successPolicy"]["targetReplicatedJobs"] == [leading(config).role]
    for role, each in roles.items():
        spec = each["template"]["spec"]
        assert (spec["completions"], spec["parallelism"]) == (1, 1)
        assert len(f"{name}-{role}-{each['replicas'] - 1}-0-abcde") <= 63
        own = container(job, role)
        assert own["name"] == "tensorflow"
        assert own["ports"] == [{"name": "grpc", "containerPort": 2222}]
        mounted = {mount["name"] for mount in own["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template(job, role)["spec"]["volumes"]}
        env_names = [each["name"] for each in own["env"]]
        assert len(set(env_names)) == len(env_names)
    assert "failurePolicy" not in job["spec"]


@pytest.mark.slow
@tried(max_examples=20, deadline=None)
@given(tree=settings_of_jobsets)
def test_every_task_gets_its_tf_config_and_the_configuration_that_was_written(tree):
    config = parse_config(tree)
    job, counts = made(tree), replicas(config)
    name = job["metadata"]["name"]
    peers = {role: count for role, count in counts.items() if role != "evaluator"}
    for role, count in counts.items():
        for index in range(count):
            found = expanded(job, role, index)
            cluster, task = from_tf_config(found["TF_CONFIG"])
            assert task == Task(role=role, index=index)
            addresses = {
                each: tuple(f"{name}-{each}-{number}-0.{name}:2222" for number in range(of))
                for each, of in peers.items()
            }
            is_alone = sum(counts.values()) == 1
            assert cluster.addresses == ({role: ("localhost:2222",)} if is_alone else addresses)
            assert parse_config(json.loads(found["FLOTILLA_CONFIG"])) == config


def test_the_longest_names_that_a_configuration_can_have_fit():
    tree = {
        "name": "m" * 50,
        "cluster": {"launcher": "jobset", "evaluator": True, "workers": 1000},
        "data": {"shards": 1000},
    }
    job = made(tree)
    refuse_what_kubernetes_refuses(job)
    assert len(f"{job['metadata']['name']}-evaluator-0-0-abcde") <= 63


def test_text_that_kubernetes_would_expand_arrives_unchanged():
    value = "$(HOME) $$(FLOTILLA_TASK_INDEX) $HOME ${HOME} $(FLOTILLA_TASK_INDEX)"
    job = made({"cluster": {"kubernetes": {"pod": {"env": {"A": value}}}}})
    assert expanded(job, "worker", 1)["A"] == value


def test_the_rule_for_lost_pods_comes_before_that_for_final_codes():
    job = made({"cluster": {"evaluator": True}})
    for role, each in roles_of(job).items():
        spec = each["template"]["spec"]
        if role == "evaluator":
            # Training does not depend on the evaluator, so its failure does not fail the job.
            assert "podFailurePolicy" not in spec
            assert template(job, role)["spec"]["restartPolicy"] == "OnFailure"
        else:
            assert spec["podFailurePolicy"] == NEVER_AGAIN
            assert template(job, role)["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["chief"]}


def test_the_settings_of_the_job_are_those_of_the_jobset_and_of_its_jobs():
    settings = {
        "queue_name": "gpus",
        "suspend": True,
        "ttl_seconds": 60,
        "active_deadline_seconds": 3600,
        "backoff_limit": 7,
        "labels": {"team": "a"},
    }
    job = made({"cluster": {"kubernetes": {"job": settings}}})
    assert job["spec"]["suspend"] is True
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    labels = {
        "kueue.x-k8s.io/queue-name": "gpus", "team": "a", "flotilla/launcher": "jobset",
    }  # fmt: skip
    assert job["metadata"]["labels"].items() >= labels.items()
    for each in roles_of(job).values():
        spec = each["template"]["spec"]
        assert (spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (3600, 7)
    # Kubernetes' default of 6 is too low: restarts that Flotilla handles would also count.
    assert roles_of(made())["worker"]["template"]["spec"]["backoffLimit"] == 1000
    assert "suspend" not in made()["spec"]


def test_the_digest_is_that_of_the_job_and_not_of_its_isolation():
    first, other, isolated = made(), made({"training": {"steps": 7}}), made()
    adoption.isolate(JobSets().templates(isolated).values())
    for role in roles_of(isolated):
        assert template(isolated, role)["metadata"]["labels"]["flotilla/network"] == "job"
    own, its, same = (
        each["metadata"]["annotations"][names.MANIFEST] for each in (first, other, isolated)
    )
    assert own == same != its
