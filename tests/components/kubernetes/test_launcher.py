"""Tests the launcher with TFJobs: refused settings, policies, cancellation, outages and secrets."""

import base64
import json
import logging
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from flotilla.components import launchers
from flotilla.components.image import PodDefaults
from flotilla.components.kubernetes import client, launcher, names, supervisor
from flotilla.components.kubernetes.adoption import isolate, network_policy
from flotilla.components.kubernetes.heartbeat import Heartbeat
from flotilla.components.kubernetes.launcher import delete_jobs
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.tfjob import KIND, TFJobs
from flotilla.trainer import events, storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import INTERRUPTED, ConfigError, UserError
from tests.components.kubernetes.attempts import (
    SECONDS,
    TWICE,
    Attempt,
    complete,
    job_of,
    run_to_end,
    running_attempt,
    running_step,
    settings,
    step,
    watching_attempt,
    without_beats,
)
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE, kubeconfig
from tests.kubernetes.control import USER
from tests.planted import SECRETS, found_in, plant


@pytest.mark.parametrize("key", ["in_process", "existing_servers"])
def test_servers_that_are_not_pods_are_refused(key):
    with pytest.raises(ConfigError, match=f"cluster.{key}: not supported with"):
        launchers.launch(job_of({"cluster": {key: True}}))


def test_without_a_cluster_the_message_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"find a Kubernetes API .*; run in a cluster, set KUBECO"):
        launchers.launch(job_of({}))


@pytest.mark.usefixtures("kube")
def test_the_steps_endpoints_reach_every_task_and_its_secrets_do_not(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://seaweedfs.kubeflow:9000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-pass-on")
    defaults = PodDefaults(image="ours:2", store_secret="ours")
    place = launcher._place(client.connect(), "models", defaults)
    assert place.defaults == defaults
    assert place.variables == {"AWS_ENDPOINT_URL": "http://seaweedfs.kubeflow:9000"}


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_chief_that_ends_with_0_is_believed_by_its_record_alone(kube, tmp_path, is_adopted):
    job = job_of(settings(), storage.uri_of(tmp_path / "run-1"))
    if is_adopted:
        kube.store.create("tfjobs", NAMESPACE, TFJobs().manifest(job, Place(namespace=NAMESPACE)))
    with ThreadPoolExecutor() as pool:
        launched = pool.submit(launchers.launch, job)
        kube.wait_watched()
        kube.run_all()
        kube.finish("chief-0", 0)
        error = launched.exception(SECONDS)
    assert isinstance(error, UserError)
    assert str(error).startswith("chief-0 ended with exit code 0 before training was complete: ")
    kube.wait_until_deleted()


@pytest.mark.parametrize(
    ("claims", "account"),
    [
        ('{"sub": "system:serviceaccount:kubeflow:pipeline-runner"}', "pipeline-runner"),
        ('{"sub": "someone"}', ""),
        ("{}", ""),
    ],
)
def test_a_token_names_the_service_account(claims, account):
    body = base64.urlsafe_b64encode(claims.encode()).decode().rstrip("=")
    assert client._service_account(f"head.{body}.tail") == account
    assert client._service_account("no token") == ""


def created(kube):
    return [each for each in kube.server.requests if each.startswith("POST /apis/kubeflow")]


def policies(kube):
    return kube.store.all("networkpolicies", NAMESPACE)


def is_isolated(pod):
    return names.NETWORK in pod["metadata"]["labels"]


def test_a_job_has_a_policy_that_admits_its_own_pods_and_goes_with_it(kube):
    attempt = Attempt(job_of(settings()))
    pods = kube.all_pods()
    [policy] = kube.store.wait(lambda: policies(kube))
    assert all(map(is_isolated, pods.values()))
    job = kube.job()["metadata"]
    assert policy["metadata"]["name"] == f"{job['name']}-{job['uid'][:8]}"
    assert policy["metadata"]["labels"][names.RUN] == job["labels"][names.RUN]
    assert policy["metadata"]["labels"][f"{names.APP}part-of"] == "flotilla"
    same = {"podSelector": {"matchLabels": {KIND.label: job["name"]}}}
    assert policy["spec"] == {**same, "policyTypes": ["Ingress"], "ingress": [{"from": [same]}]}
    run_to_end(kube, attempt)
    assert not policies(kube)


def test_without_the_permission_it_goes_on_and_says_so_once(kube, caplog):
    caplog.set_level(logging.WARNING)
    kube.server.control.deny(USER, "create networkpolicies")
    attempt = Attempt(job_of(settings()))
    assert not any(map(is_isolated, kube.all_pods().values()))
    run_to_end(kube, attempt)
    assert not [each for each in kube.server.requests if "networkpolicies" in each]
    said = [each for each in caplog.messages if "create networkpolicies.networking.k8s.io" in each]
    assert len(said) == 1


def test_a_policy_that_is_refused_leaves_no_open_job(kube):
    kube.faults.add("POST .*networkpolicies", 403)
    message = Attempt(job_of(settings())).failure()
    assert "cannot create the network policy of the job" in message
    assert 'cannot create resource "networkpolicies"' in message
    kube.wait_until_deleted()


def test_a_job_of_another_launcher_gets_no_policy():
    template = {"metadata": {"labels": {}}, "spec": {}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": "job", "uid": "0123456789", "labels": {"team": "a"}},
        "spec": {"tfReplicaSpecs": {"Worker": {"template": template}}},
    }
    assert network_policy(KIND, job, [template]) is None
    isolate([template])
    policy = network_policy(KIND, job, [template])
    assert policy is not None
    assert policy["metadata"]["name"] == "job-01234567"
    assert policy["metadata"]["labels"] == {}


KUBERNETES = Config().cluster.kubernetes


@pytest.mark.cluster
def test_cancelled_while_queueing_the_first_request_is_the_delete(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.all_pods()
        before = len(kube.server.requests)
        process.signal()
        assert process.end()[::2] == (INTERRUPTED, "interrupted before training began")
    assert next(without_beats(kube.server.requests[before:])).startswith("DELETE ")
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_cancelled_the_launcher_waits_for_the_last_checkpoint(kube):
    kube.store.graceful.add("pods")
    with running_step(kube) as process:
        kube.store.wait(lambda: any("chief-0/log" in each for each in kube.server.requests))
        process.signal()
        kube.store.wait(lambda: not kube.jobs())
        kube.write_log("chief-0", "saving")
        kube.finish("chief-0", 130, "interrupted at global step 7; checkpoint gs://b/step-7")
        for pod in kube.pods().values():
            kube.store.remove("pods", NAMESPACE, pod["metadata"]["name"])
        code, out, message = process.end()
    assert (code, message) == (130, "interrupted at global step 7; checkpoint gs://b/step-7")
    assert "[chief-0] saving" in out


@pytest.mark.cluster
def test_a_second_signal_does_not_wait(kube):
    kube.store.graceful.add("pods")
    with running_step(kube) as process:
        process.signal()
        kube.store.wait(lambda: not kube.jobs())
        process.signal()
        assert process.end()[::2] == TWICE


@pytest.mark.cluster
def test_cancelled_while_the_api_is_unreachable_the_delete_is_retried(kube):
    with running_step(kube) as process:
        kube.faults.add("DELETE", 503, times=3)
        process.signal()
        code, _, _ = process.end()
    assert code == INTERRUPTED
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_the_retry_of_a_killed_step_adopts_its_job(kube):
    with running_step(kube) as process:
        uid, heartbeat = kube.job()["metadata"]["uid"], kube.wait_renewed()
        process.signal(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    assert kube.job()["metadata"]["uid"] == uid
    retry = Attempt(job_of(settings()))
    kube.wait_renewed(but=heartbeat)
    complete(kube, retry)


@pytest.mark.cluster
def test_the_exit_step_deletes_only_the_jobs_of_its_run(kube):
    with step(kube, settings()) as process:
        kube.all_pods()
        process.signal(signal.SIGKILL)
        process.end()
    other = Attempt(job_of(settings(), root="gs://b/run-2"))
    kube.store.wait(lambda: len(kube.store.all("pods", NAMESPACE)) == 6)
    assert len(delete_jobs(TFJobs(), KUBERNETES, "run-1")) == 1
    assert delete_jobs(TFJobs(), KUBERNETES, "run-1") == []
    assert [job["metadata"]["labels"]["flotilla/run"] for job in kube.jobs()] == ["run-2"]
    pods.finished(kube.store, kube.pod("chief-0"), 0)
    other.succeed()
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_one_job_that_may_not_be_deleted_leaves_no_other_one(kube):
    made = TFJobs().manifest(job_of(settings()), Place(namespace=NAMESPACE))
    for name in ("first", "second"):
        kube.store.create(
            "tfjobs", NAMESPACE, {**made, "metadata": {**made["metadata"], "name": name}}
        )
    kube.faults.add("DELETE .*tfjobs/first", 403)
    with pytest.raises(UserError, match="cannot delete the jobs with the label"):
        delete_jobs(TFJobs(), KUBERNETES, "run-1")
    assert [job["metadata"]["name"] for job in kube.jobs()] == ["first"]


@pytest.mark.cluster
def test_a_job_that_is_deleted_before_it_is_watched_ends_the_step(kube, monkeypatch):
    hold = Heartbeat.hold

    def hold_and_lose(heartbeat, job, *limits):
        hold(heartbeat, job, *limits)
        kube.store.remove("tfjobs", NAMESPACE, job["metadata"]["name"])

    monkeypatch.setattr(Heartbeat, "hold", hold_and_lose)
    assert "another user or program deleted" in Attempt(job_of(settings())).failure()
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_the_deletion_of_the_steps_pod_deletes_the_job(kube, monkeypatch):
    pod = kube.store.create("pods", NAMESPACE, {"metadata": {"name": "step"}, "status": {}})
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("KFP_POD_UID", pod["metadata"]["uid"])
    attempt = Attempt(job_of(settings()))
    kube.wait_watched()
    kube.store.remove("pods", NAMESPACE, "step")
    assert "another user or program deleted" in attempt.failure()
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_a_job_that_is_deleted_before_its_first_heartbeat_is_said_to_be(kube):
    kube.faults.add("PATCH .*leases", 404)
    message = Attempt(job_of(settings())).failure()
    assert "which ended the run; to continue from its newest checkpoint" in message
    assert "namespace" not in message


@pytest.mark.slow
def test_an_outage_of_the_api_loses_no_line(kube, capfd):
    attempt = running_attempt(kube)
    kube.write_log("chief-0", "before")
    kube.server.go_down()
    kube.write_log("chief-0", "meanwhile")
    kube.finish("chief-0", 0)
    kube.store.wait(lambda: kube.faults.hits.get("down", 0) >= 6)
    kube.faults.clear()
    attempt.succeed()
    kube.wait_until_deleted()
    out = capfd.readouterr().out.splitlines()
    assert [line for line in out if "chief-0" in line] == [
        "[chief-0] before", "[chief-0] meanwhile",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "status", [429, *(pytest.param(code, marks=pytest.mark.slow) for code in (401, 500, 503)), 0]
)
def test_a_busy_api_and_an_expired_token_are_retried(kube, status):
    kube.faults.add("(POST|GET|DELETE) .*tfjobs", status, times=3, headers={"Retry-After": "1"})
    run_to_end(kube, watching_attempt(kube))


def test_a_lost_answer_creates_no_second_job(kube):
    kube.faults.add("POST .*tfjobs", 500, late=True, times=1)
    run_to_end(kube, watching_attempt(kube))
    assert len(created(kube)) == 2


def test_an_expired_watch_lists_again(kube, monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.05)
    attempt = running_attempt(kube)
    kube.store.wait(lambda: sum("watch=" in each for each in kube.server.requests) >= 2)
    with kube.store.changed:
        # The events of the outage have expired, so only a new list can show what happened.
        kube.server.drop_streams()
        kube.finish("worker-0", 0)
        kube.finish("chief-0", 0)
        kube.store.expire()
    attempt.succeed()
    kube.wait_until_deleted()


@pytest.mark.parametrize("request_of", ["GET .*pods.*watch=", "POST .*tfjobs"])
def test_without_permission_the_message_names_the_remedy(kube, request_of):
    kube.faults.add(request_of, 403)
    assert "the permissions in deploy/" in Attempt(job_of(settings())).failure()
    kube.wait_until_deleted()


def test_pods_that_no_watch_has_seen_are_not_waited_for(kube, monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 300)
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.2)
    # The watch of pods begins after the job was created, so it never reports pods deleted earlier.
    kube.faults.add(r"GET .*/pods\?", 503, times=1)
    attempt = Attempt(job_of(settings()))
    kube.store.wait(lambda: kube.faults.hits)
    run_to_end(kube, attempt)


def test_a_refused_heartbeat_is_retried(kube):
    attempt = running_attempt(kube, heartbeat=1)
    kube.wait_renewed()
    kube.faults.add("PATCH .*leases", 403, times=2)
    kube.store.wait(lambda: kube.faults.hits.get("PATCH .*leases") == 2)
    [before] = kube.leases()
    kube.store.wait(lambda: kube.leases() != [before])
    assert kube.faults.hits == {"PATCH .*leases": 2}
    complete(kube, attempt)


def test_without_the_kind_the_message_names_what_to_install(kube):
    kube.server.control.kinds.clear()
    message = Attempt(job_of(settings())).failure()
    assert "tfjobs: Not Found (HTTP 404); this cluster does not serve TFJobs" in message
    assert "its CRD tfjobs.kubeflow.org, is not installed" in message
    assert "permission" not in message
    # If the cluster does not serve the kind, the run cannot have a job.
    assert delete_jobs(TFJobs(), Config().cluster.kubernetes, "run-1") == []


def test_without_the_namespace_the_message_names_it(kube):
    kube.server.control.absent.add(NAMESPACE)
    message = Attempt(job_of(settings())).failure()
    assert f'namespaces "{NAMESPACE}" not found (HTTP 404); correct the namespace' in message


def test_a_job_that_admission_refuses_is_not_a_missing_permission(kube):
    hard = {"count/tfjobs.kubeflow.org": "0"}
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    kube.store.create("resourcequotas", NAMESPACE, quota)
    message = Attempt(job_of(settings())).failure()
    assert "exceeded quota: team, requested: count/tfjobs.kubeflow.org=1" in message
    assert "permission" not in message


@pytest.mark.slow
def test_an_operator_that_does_not_answer_its_webhook_is_named(kube):
    kube.server.control.is_webhook_silent = True
    message = Attempt(job_of(settings(operator=1))).failure()
    assert message.startswith("the training operator has not reacted for 1 s (cluster.kubernetes.")
    assert 'no endpoints available for service "training-operator"; check whether it is' in (
        message
    )
    kube.server.control.is_webhook_silent = False
    attempt = watching_attempt(kube)
    run_to_end(kube, attempt)


@pytest.fixture
def around(kube, tmp_path, monkeypatch, caplog):
    """Set all test secrets, including the kubeconfig's token, and write events to a file."""
    caplog.set_level(logging.DEBUG)
    plant(tmp_path / "home", monkeypatch)
    token = SECRETS["kube"]
    kube.server.control.users[token] = kube.server.control.user
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "planted", kube.server.url, token)))
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return kube


def written(kube, tmp_path, caplog, capfd, error=""):
    out, err = capfd.readouterr()
    record = tmp_path / "events.jsonl"
    texts = {str(each)[:60]: each for each in kube.server.received}
    texts |= {
        "stored": json.dumps([each[-1] for each in kube.store.history]).encode(),
        "events": record.read_bytes() if record.exists() else b"",
        "log": caplog.text.encode(),
        "stdout": out.encode(),
        "stderr": err.encode(),
        "error": error.encode(),
    }
    return texts


def test_a_job_has_no_secret_and_the_token_is_sent_as_a_header_alone(
    around, tmp_path, caplog, capfd
):
    attempt = running_attempt(around)
    around.write_log("chief-0", "a line")
    around.finish("chief-0", 0)
    attempt.succeed()
    around.wait_until_deleted()
    assert around.server.tokens == {SECRETS["kube"]}
    texts = written(around, tmp_path, caplog, capfd)
    for said in (b"tfReplicaSpecs", b"networkpolicies"):
        assert any(said in each for each in texts.values())
    assert list(found_in(texts)) == []


@pytest.mark.parametrize("request_of", ["POST .*/tfjobs", "POST .*networkpolicies", "GET .*/pods"])
def test_a_refusal_that_echoes_the_headers_shows_no_token(
    around, tmp_path, caplog, capfd, request_of
):
    around.faults.add(request_of, 403, echoes=True)
    message = Attempt(job_of(settings())).failure()
    assert "denied" in message
    assert list(found_in(written(around, tmp_path, caplog, capfd, message))) == []


@pytest.mark.slow
def test_an_unreachable_api_fails_after_its_deadline_and_shows_no_token(
    around, tmp_path, caplog, capfd, monkeypatch
):
    monkeypatch.setattr(launcher, "REMOVAL_SECONDS", 1)
    attempt = running_attempt(around, unreachable=2)
    around.server.go_down()
    message = attempt.failure()
    assert "has not answered for 2 s (cluster.kubernetes.deadlines.unreachable)" in message
    assert list(found_in(written(around, tmp_path, caplog, capfd, message))) == []


def test_a_secret_in_an_object_is_found(around, tmp_path, caplog, capfd):
    annotated = {"metadata": {"name": "leak", "annotations": {"token": SECRETS["kube"]}}}
    around.store.create("configmaps", NAMESPACE, annotated)
    found = list(found_in(written(around, tmp_path, caplog, capfd)))
    assert found == [("kube", "stored")]
