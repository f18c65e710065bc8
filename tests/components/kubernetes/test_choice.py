"""Tests how `cluster.launcher: auto` is resolved from what the cluster supports."""

import pytest

from flotilla.components import launchers
from flotilla.components.kubernetes.client import Api, UnreachableError, connect
from flotilla.components.kubernetes.pods.template import Place
from flotilla.trainer.runtime.errors import UserError
from tests.components.kubernetes.attempts import job_of, settings
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER


@pytest.fixture
def job():
    tree = settings()
    tree["cluster"]["launcher"] = "auto"
    return job_of(tree)


def create(job, *names):
    for name in names:
        engine = launchers.engine(name)
        tree = engine.manifest(job, Place(namespace=NAMESPACE))
        Api(connect(), NAMESPACE).create(engine.kind.resource, tree)


def test_without_a_cluster_it_is_this_machine(monkeypatch, job):
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert launchers.choose(job) == "local"


def test_it_is_the_jobset_where_the_cluster_serves_both(kube, job):
    assert launchers.choose(job) == "tfjob"
    kube.install_jobset()
    assert launchers.choose(job) == "jobset"


def test_a_retry_takes_the_engine_of_the_job_that_is_left(kube, job):
    create(job, "tfjob")
    kube.install_jobset()
    assert launchers.choose(job) == "tfjob"


def test_one_that_this_user_may_not_use_is_named_by_the_launcher(kube, job):
    kube.install_jobset()
    kube.server.control.deny(USER, "list jobsets", "create jobsets")
    assert launchers.choose(job) == "jobset"
    with pytest.raises(UserError, match="create jobsets"):
        launchers.launch(job)


def test_a_kind_that_is_not_served_is_none_although_permission_for_it_is_refused(kube, job):
    # Kubernetes checks the permission before it checks whether the kind exists.
    kube.server.control.deny(USER, "list jobsets")
    assert launchers.choose(job) == "tfjob"
    create(job, "tfjob")
    launchers.end({"cluster": {"launcher": "auto"}}, "run-1")
    kube.wait_until_deleted()


def test_whether_a_kind_is_served_is_asked_again_after_an_outage(kube, job, monkeypatch):
    kube.server.control.deny(USER, "list jobsets")
    serves, outage = Api.serves, [UnreachableError("no answer")]

    def interrupted(api, resource):
        if outage:
            raise outage.pop()
        return serves(api, resource)

    monkeypatch.setattr(Api, "serves", interrupted)
    assert launchers.choose(job) == "tfjob"
    assert not outage


def test_the_exit_step_ends_what_it_may_and_says_what_it_may_not(kube, job):
    kube.install_jobset()
    kube.server.control.deny(USER, "list jobsets")
    create(job, "tfjob")
    with pytest.raises(UserError, match='cannot list resource "jobsets"'):
        launchers.end({"cluster": {"launcher": "auto"}}, "run-1")
    kube.wait_until_deleted()


def test_where_neither_is_served_the_remedy_is_named(kube, job):
    kube.server.control.kinds.clear()
    with pytest.raises(UserError, match="neither JobSets nor TFJobs; `flotilla doctor"):
        launchers.choose(job)


def test_the_exit_step_ends_what_is_left_of_either(kube, job):
    kube.install_jobset()
    create(job, *launchers.ENGINES)
    launchers.end({"cluster": {"launcher": "auto"}}, "run-1")
    kube.wait_until_deleted()
