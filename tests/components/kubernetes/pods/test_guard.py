"""Tests that a guard starts the task, forwards signals, ends orphans and reports names."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.client import Api
from flotilla.components.kubernetes.pods.guard import NAMES_SECONDS, Guard, PeerNames, TaskProcess
from flotilla.components.kubernetes.pods.shutdown import (
    Ending,
    HeartbeatAge,
    ShutdownConnection,
    ShutdownServer,
    _look,
)
from flotilla.components.kubernetes.pods.template import grace_seconds
from flotilla.trainer import events
from flotilla.trainer.cluster import termination
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster
from tests.components.kubernetes.attempts import ROOT
from tests.kubernetes.cluster import NAMESPACE

pytestmark = pytest.mark.cluster
ENDS_AT_SIGTERM = (
    "import pathlib, signal, threading; term = threading.Event()\n"
    "signal.signal(signal.SIGTERM, lambda *_: term.set())\n"
    "print('ready', flush=True); term.wait()\n"
    f"pathlib.Path({termination.FILE!r}).write_text('interrupted at global step 7')\n"
    "raise SystemExit(130)"
)
SERVES = "import time; print('ready', flush=True); time.sleep(1000)"
MODULE = "flotilla.components.kubernetes.pods.guard"
CLUSTER = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}


@pytest.fixture(autouse=True)
def _own_port(port, monkeypatch):
    """Keep the leader's guard from listening on the default port, which the pods of others use."""
    monkeypatch.setenv("FLOTILLA_GUARD_PORT", str(port))


def tf_config(role):
    return json.dumps({"cluster": CLUSTER, "task": {"type": role, "index": 0}})


def configuration(**cluster):
    return {"FLOTILLA_CONFIG": json.dumps({"cluster": cluster})}


@contextmanager
def guard(folder, code, *, ready=True, **variables):
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, "--", sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if ready:
            for line in process.stdout:
                if line == "ready\n":
                    break
        yield process
    finally:
        process.kill()
        process.communicate()


def exit_code_of(process):
    process.communicate(timeout=300)
    return process.returncode


@pytest.mark.parametrize(
    ("role", "cluster", "exit_code", "starts"),
    [
        ("chief", {"max_restarts": 1}, 137, 2),
        ("chief", {"kubernetes": {"pod": {"restart_policy": "Never"}}}, 137, 1),
        # Training does not depend on the evaluator, so its restarts are not limited.
        ("evaluator", {"max_restarts": 0}, 0, 3),
    ],
)
def test_a_task_that_was_killed_begins_again_in_its_pod(tmp_path, role, cluster, exit_code, starts):
    code = (
        "import os, pathlib, signal; starts = pathlib.Path('starts'); starts.open('a').write('x')\n"
        "len(starts.read_text()) < 3 and os.kill(os.getpid(), signal.SIGKILL)"
    )
    variables = {"TF_CONFIG": tf_config(role), **configuration(**cluster)}
    with guard(tmp_path, code, ready=False, **variables) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == exit_code
    assert len((tmp_path / "starts").read_text()) == starts
    restarts = list(filter(None, map(events.parse, out.splitlines())))
    assert restarts == [
        events.Restart(
            task=f"{role}-0", cause="exit code 137 (signal SIGKILL)", restarts=number, code=137
        )
        for number in range(1, starts)
    ]


def test_a_task_that_loses_its_cluster_at_its_start_begins_again_and_that_counts_for_nothing(
    tmp_path,
):
    code = (
        "import pathlib; starts = pathlib.Path('starts'); starts.open('a').write('x')\n"
        f"message = pathlib.Path({termination.FILE!r}); assert not message.exists()\n"
        "message.write_text('a task of the cluster is gone'); print('ready', flush=True)\n"
        "raise SystemExit(138 if len(starts.read_text()) < 3 else 0)"
    )
    never = configuration(max_restarts=0)
    with guard(tmp_path, code, ready=False, TF_CONFIG=tf_config("ps"), **never) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert len((tmp_path / "starts").read_text()) == 3
    assert not any(map(events.parse, out.splitlines()))


def test_the_configuration_is_a_file_and_not_a_variable_of_the_task(tmp_path):
    code = "import os; print(open('config.json').read(), 'FLOTILLA_CONFIG' in os.environ)"
    with guard(tmp_path, code, ready=False, FLOTILLA_CONFIG='{"name": "a"}') as process:
        assert process.stdout.read() == '{"name": "a"} False\n'


def test_wrong_usage_is_one_line(tmp_path):
    command = [sys.executable, "-m", MODULE, "python"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    with guard(tmp_path, "", ready=False) as process:
        assert exit_code_of(process) == 0


@pytest.mark.parametrize("dies", [False, True])
def test_a_parameter_server_stays_up_until_its_leader_has_saved_and_never_begins_again(
    tmp_path, dies
):
    os.mkfifo(tmp_path / "go")
    saving = ENDS_AT_SIGTERM.replace(
        "term.wait()", "term.wait(); print('saving', flush=True); open('go').read()"
    )
    serves = f"import os; open('server', 'w').write(str(os.getpid()))\n{SERVES}"
    with (
        guard(tmp_path, saving, TF_CONFIG=tf_config("chief")) as chief,
        guard(tmp_path, serves, TF_CONFIG=tf_config("ps")) as server,
    ):
        for process in (chief, server):
            process.send_signal(signal.SIGTERM)
        assert chief.stdout.readline() == "saving\n"
        assert server.poll() is None
        if dies:
            os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
            assert server.wait(300) == 128 + signal.SIGKILL
        (tmp_path / "go").write_text("go")
        assert exit_code_of(chief) == 130
        assert exit_code_of(server) == 128 + (signal.SIGKILL if dies else signal.SIGTERM)


def test_a_parameter_server_without_a_leader_ends(tmp_path):
    with guard(tmp_path, SERVES, TF_CONFIG=tf_config("ps")) as server:
        server.send_signal(signal.SIGTERM)
        assert exit_code_of(server) == 128 + signal.SIGTERM


# A guard that receives SIGTERM immediately after its task has started.
ASKED_AT_ONCE = """
import os, signal, subprocess, sys
from flotilla.components.kubernetes.pods import guard
begin = subprocess.Popen
def begin_and_ask(*command, **options):
    process = begin(*command, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
guard.subprocess.Popen = begin_and_ask
sys.exit(guard.main(["--", sys.executable, "-c", "import time; time.sleep(600)"]))
"""


def test_a_signal_at_the_start_of_the_task_ends_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASKED_AT_ONCE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": tf_config("ps")},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM


def test_a_late_shutdown_connection_learns_that_the_leader_is_shutting_down(port):
    server = ShutdownServer(1, port)
    server.announce()
    connection = ShutdownConnection("127.0.0.1", port)
    waited = threading.Thread(target=connection.wait, args=(60, 60))
    waited.start()
    # The leader has announced its shutdown, but its process has not exited yet.
    waited.join(0.2)
    assert waited.is_alive()
    # Close the connections, as the exit of the leader's process would do.
    for accepted in server._connections:
        accepted.close()
    waited.join(60)
    assert not waited.is_alive()


@pytest.fixture
def watched(kube):
    """Return the environment variables of the leading pod of a job with a heartbeat."""
    job = {"metadata": {"name": "job"}, "spec": {"runPolicy": {}, "tfReplicaSpecs": {}}}
    uid = kube.store.create("tfjobs", NAMESPACE, job)["metadata"]["uid"]
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "name": "job", "uid": uid}
    spec = {"holderIdentity": "a", "acquireTime": "0", "renewTime": "1"}
    lease = {"metadata": {"name": "job", "ownerReferences": [owner]}, "spec": spec}
    kube.store.create("leases", NAMESPACE, lease)
    return {"KUBECONFIG": str(kube.kubeconfig), **limit(1), "TF_CONFIG": tf_config("chief")}


def limit(seconds):
    """Return the variable that sets the time limit for the heartbeat, in seconds."""
    kind = ["tfjobs", "kubeflow.org", "v1"]
    place = {"namespace": NAMESPACE, "job": "job", "kind": kind, "seconds": str(seconds)}
    return {"FLOTILLA_LAUNCHER": json.dumps(place)}


def ask_to_stop(kube):
    uid = kube.job()["metadata"]["uid"]
    stop = {"metadata": {"annotations": {names.STOP: uid}}}
    kube.store.patch("leases", NAMESPACE, "job", stop)


@pytest.mark.parametrize("allowed", [True, False])
def test_an_orphan_ends_with_a_checkpoint_and_its_job(kube, watched, tmp_path, allowed):
    if not allowed:
        kube.faults.add("DELETE", 403)
    with guard(tmp_path, ENDS_AT_SIGTERM, **watched) as process:
        # The operator does not restart a task that exits with code 1, so the job fails.
        assert exit_code_of(process) == 1
    message = termination.read(tmp_path)
    assert message == "no heartbeat from the launcher for 1 s; interrupted at global step 7"
    assert bool(kube.jobs()) is not allowed


def test_a_renewed_or_unreadable_heartbeat_does_not_end_training(kube, watched, tmp_path):
    with guard(tmp_path, ENDS_AT_SIGTERM, **watched) as process:
        kube.store.wait(lambda: len(kube.server.requests) >= 3)
        # Together, these renewals take longer than the limit.
        for number in range(2, 18):
            renewed = {"spec": {"renewTime": str(number)}}
            kube.store.patch("leases", NAMESPACE, "job", renewed)
            seen = len(kube.server.requests)
            kube.store.wait(lambda seen=seen: len(kube.server.requests) > seen)
        kube.server.go_down()
        kube.store.wait(lambda: kube.faults.hits.get("down", 0) >= 15)
        assert process.poll() is None
        kube.faults.clear()
        assert exit_code_of(process) == 1


def test_a_stop_ends_the_task_with_a_checkpoint_and_then_the_job(kube, watched, tmp_path):
    with guard(tmp_path, ENDS_AT_SIGTERM, **{**watched, **limit(1000)}) as process:
        ask_to_stop(kube)
        out, _ = process.communicate(timeout=300)
    # The operator would restart the task if the code were 128 or higher.
    assert process.returncode == 1
    assert names.STOPPING in out
    assert termination.read(tmp_path) == "interrupted at global step 7"
    assert not kube.jobs()


def test_a_stop_that_was_asked_for_before_the_pod_began_is_seen(kube, watched, tmp_path):
    ask_to_stop(kube)
    with guard(tmp_path, ENDS_AT_SIGTERM, **{**watched, **limit(1000)}) as process:
        assert exit_code_of(process) == 1
    assert not kube.jobs()


def test_a_stop_is_seen_where_the_lease_may_be_read_and_not_watched(kube, watched, tmp_path):
    kube.faults.add(r"GET .*leases\?", 422)
    ask_to_stop(kube)
    with guard(tmp_path, ENDS_AT_SIGTERM, **{**watched, **limit(5)}) as process:
        assert exit_code_of(process) == 1
    assert termination.read(tmp_path) == "interrupted at global step 7"


def test_a_task_that_is_done_when_it_is_stopped_is_done(kube, watched, tmp_path):
    done = ENDS_AT_SIGTERM.replace("SystemExit(130)", "SystemExit(0)")
    with guard(tmp_path, done, **{**watched, **limit(1000)}) as process:
        ask_to_stop(kube)
        assert exit_code_of(process) == 0


def test_a_stop_of_an_earlier_job_of_this_name_is_none_of_this_one(kube, watched, tmp_path):
    stop = {"metadata": {"annotations": {names.STOP: "another"}}}
    kube.store.patch("leases", NAMESPACE, "job", stop)
    with guard(tmp_path, ENDS_AT_SIGTERM, **{**watched, **limit(1000)}) as process:
        kube.store.wait(lambda: any("watch=" in each for each in kube.server.requests))
        assert process.poll() is None
        ask_to_stop(kube)
        assert exit_code_of(process) == 1


def test_a_job_whose_launcher_died_before_its_first_renewal_ends_after_two_limits(
    kube, watched, tmp_path
):
    kube.store.patch("leases", NAMESPACE, "job", {"spec": {"renewTime": "0"}})
    with guard(tmp_path, ENDS_AT_SIGTERM, **watched) as process:
        assert exit_code_of(process) == 1
    assert termination.read(tmp_path).startswith("no heartbeat from the launcher for 2 s")


def test_a_refusal_that_may_pass_does_not_end_the_watch_of_the_launcher(kube, watched, tmp_path):
    for status in (422, 429, 500, 503):
        kube.faults.add("GET .*leases/job", status, times=1)
    with guard(tmp_path, ENDS_AT_SIGTERM, **watched) as process:
        assert exit_code_of(process) == 1
    assert termination.read(tmp_path).startswith("no heartbeat from the launcher for 1 s")


def test_without_a_lease_training_goes_on(kube, watched, tmp_path):
    kube.store.delete("tfjobs", NAMESPACE, "job")
    with guard(tmp_path, ENDS_AT_SIGTERM, **watched) as process:
        # Wait for about three times the heartbeat limit.
        reads = "GET /apis/coordination.k8s.io/v1/namespaces/models/leases/job"
        kube.store.wait(lambda: kube.server.requests.count(reads) >= 30)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert exit_code_of(process) == 130


@pytest.mark.parametrize(("seconds", "term"), [(0, 110.0), (25, 20.0), (600, 590.0)])
def test_a_task_is_killed_in_time_before_the_end_of_its_grace_period(seconds, term):
    tree = {"cluster": {"kubernetes": {"pod": {"grace_seconds": seconds}}}}
    grace = grace_seconds(parse_config(tree), "chief")
    assert grace == (seconds or 120)
    process = create_autospec(TaskProcess, instance=True)
    assert Guard(process, grace).term_seconds == term


def test_without_permission_the_launcher_is_not_watched_and_training_continues(
    kube, watched, tmp_path
):
    kube.faults.add("GET .*leases", 403)
    with guard(tmp_path, ENDS_AT_SIGTERM, **watched) as process:
        for line in process.stdout:
            if event := events.parse(line):
                break
        assert isinstance(event, events.LauncherUnwatched)
        process.send_signal(signal.SIGTERM)
        assert exit_code_of(process) == 130


def test_time_in_which_an_answer_is_none_does_not_count():
    guard, api = create_autospec(Ending, instance=True), create_autospec(Api, instance=True)
    lease = {"metadata": {}, "spec": {"acquireTime": "0", "renewTime": "1"}}
    api.get.side_effect = [lease, ValueError("the page of a proxy"), lease]
    times = iter([0.0, 100.0])
    look = partial(_look, guard, api, "job", 60, HeartbeatAge(lambda: next(times)))
    assert look()
    with pytest.raises(ValueError, match="proxy"):
        look()
    assert look()
    guard.end_job.assert_not_called()


@given(st.lists(st.tuples(st.floats(0, 10), st.sampled_from(["same", "new", "unreadable"]))))
def test_the_age_counts_only_time_in_which_the_same_heartbeat_was_read(course):
    now, age, number, expected, readable = 0.0, HeartbeatAge(lambda: now), 0, 0.0, False
    for seconds, kind in course:
        now += seconds
        if kind == "unreadable":
            age.unreadable()
            readable = False
            continue
        number += kind == "new"
        expected = 0.0 if kind == "new" else expected + seconds * readable
        found = age.read(f"heartbeat-{number}")
        if not readable and expected == 0.0:
            assert found >= 0.0
        assert abs(found - expected) < 1e-6
        readable = True


PEERS = Cluster(
    addresses={"chief": ("a-chief-0-0.a:2222",), "ps": ("a-ps-0-0.a:2222", "a-ps-1-0.a:2222")}
)


class Resolver:
    """A resolver that knows only the given names; `at` is the current time in seconds."""

    def __init__(self, *known: str) -> None:
        self.known, self.asked, self.at = set(known), [], 0.0

    def __call__(self, name: str, _port: int) -> None:
        self.asked.append(name)
        if name not in self.known:
            raise OSError(-2, "Name or service not known")

    def clock(self) -> float:
        return self.at


@pytest.fixture
def resolver():
    return Resolver("a-chief-0-0.a")


@pytest.fixture
def peers(resolver):
    return PeerNames(PEERS, resolver, resolver.clock)


def test_names_that_never_resolve_are_said_once_by_name(resolver, peers, caplog):
    assert peers.look()
    assert not caplog.messages
    resolver.at = NAMES_SECONDS
    for _ in range(3):
        assert peers.look()
    assert caplog.messages == [f"{names.UNRESOLVED}a-ps-0-0.a, a-ps-1-0.a"]
    assert resolver.asked.count("a-chief-0-0.a") == 1


@pytest.mark.parametrize(("seconds", "said"), [(0.0, []), (NAMES_SECONDS, [names.RESOLVED])])
def test_that_names_resolve_is_said_only_if_they_did_not_in_time(
    resolver, peers, caplog, seconds, said
):
    resolver.at = seconds
    assert peers.look()
    resolver.known |= {"a-ps-0-0.a", "a-ps-1-0.a"}
    resolver.at = 10 * NAMES_SECONDS
    assert not peers.look()
    assert caplog.messages[1:] == said
    assert len(caplog.messages) == 2 * len(said)
