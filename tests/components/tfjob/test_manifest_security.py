"""The pods of a job where the namespace enforces the Pod Security Standard `restricted`."""

from __future__ import annotations

import pytest

from tests.components.kubernetes.attempts import Attempt, job_of, settings
from tests.components.tfjob.test_manifest import container, made, template
from tests.kubernetes.admission import ENFORCE, refusal
from tests.kubernetes.cluster import NAMESPACE

RESTRICTED = {ENFORCE: "restricted"}
LEAST = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
REQUIRED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def with_pod(**pod):
    return {"cluster": {"evaluator": True, "kubernetes": {"pod": pod}}}


def admitted(job):
    """Return by role whether the pods of a job are admitted."""
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


def test_a_job_trains_in_a_namespace_that_enforces_it(kube):
    kube.store.labels[NAMESPACE] = RESTRICTED
    attempt = Attempt(job_of(settings()))
    kube.wait_watched()
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    kube.wait_until_deleted()


def test_pods_that_are_refused_are_the_reason_in_the_launchers_line(kube):
    kube.store.labels[NAMESPACE] = RESTRICTED
    tree = settings(queueing=1)
    tree["cluster"]["kubernetes"]["pod"] = {"security": "image"}
    message = Attempt(job_of(tree)).failure()
    assert "FailedCreatePod: Error creating: pods " in message
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation' in message
    kube.wait_until_deleted()
