"""The first process of a pod: what it starts, which signals it passes on, when it gives up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.tfjob import names
from components.tfjob.guard import HeartbeatAge
from components.tfjob.shutdown import ShutdownConnection, ShutdownServer
from tests.components.tfjob.attempts import ROOT
from tests.kubernetes.cluster import NAMESPACE
from trainer.cluster import termination
from trainer.cluster.local import free_port

pytestmark = pytest.mark.cluster
HEEDS = (
    "import pathlib, signal, threading; asked = threading.Event()\n"
    "signal.signal(signal.SIGTERM, lambda *_: asked.set())\n"
    "print('ready', flush=True); asked.wait()\n"
    "pathlib.Path('words.txt').write_text('interrupted at global step 7'); raise SystemExit(130)"
)
SERVES = "import time; print('ready', flush=True); time.sleep(100)"
CLUSTER = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}


def tf_config(role):
    return json.dumps({"cluster": CLUSTER, "task": {"type": role, "index": 0}})


@contextmanager
def guard(folder, code, *, ready=True, **variables):
    process = subprocess.Popen(
        [sys.executable, "-m", "components.tfjob.guard", "--", sys.executable, "-c", code],
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


def ended(process):
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("raise SystemExit(138)", 138),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_the_tasks_end_is_the_guards(tmp_path, code, exit_code):
    with guard(tmp_path, code, ready=False) as process:
        assert ended(process) == exit_code


def test_the_configuration_becomes_a_file_and_is_no_variable_of_the_task(tmp_path):
    code = "import os; print(open('config.json').read(), 'FLOTILLA_CONFIG' in os.environ)"
    with guard(tmp_path, code, ready=False, FLOTILLA_CONFIG='{"name": "a"}') as process:
        assert process.stdout.read() == '{"name": "a"} False\n'


def test_wrong_usage_is_one_line(tmp_path):
    command = [sys.executable, "-m", "components.tfjob.guard", "python"]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    with guard(tmp_path, "", ready=False) as process:
        assert ended(process) == 0


def test_a_leader_passes_an_end_on_at_once(tmp_path):
    port = str(free_port())
    with guard(tmp_path, HEEDS, TF_CONFIG=tf_config("chief"), FLOTILLA_GUARD_PORT=port) as chief:
        chief.send_signal(signal.SIGTERM)
        assert ended(chief) == 130


def test_a_parameter_server_outlives_a_leader_that_is_saving(tmp_path):
    port = str(free_port())
    saving = HEEDS.replace("asked.wait()", "asked.wait(); print('saving', flush=True); input()")
    saving = f"import sys; sys.stdin = open(0)\n{saving}"
    os.mkfifo(tmp_path / "go")
    saving = saving.replace("input()", "open('go').read()")
    more = {"FLOTILLA_GUARD_PORT": port}
    with (
        guard(tmp_path, saving, TF_CONFIG=tf_config("chief"), **more) as chief,
        guard(tmp_path, SERVES, TF_CONFIG=tf_config("ps"), **more) as server,
    ):
        # The connection between the two has to be there: the server's end tells.
        for process in (chief, server):
            process.send_signal(signal.SIGTERM)
        assert chief.stdout.readline() == "saving\n"
        assert server.poll() is None
        (tmp_path / "go").write_text("go")
        assert ended(chief) == 130
        assert ended(server) == 128 + signal.SIGTERM


def test_a_parameter_server_without_a_leader_ends(tmp_path):
    port = str(free_port())
    more = {"TF_CONFIG": tf_config("ps"), "FLOTILLA_GUARD_PORT": port}
    with guard(tmp_path, SERVES, **more) as server:
        server.send_signal(signal.SIGTERM)
        assert ended(server) == 128 + signal.SIGTERM


def test_a_tether_that_is_made_late_hears_that_the_leader_is_ending():
    port = free_port()
    anchor = ShutdownServer(port)
    anchor.ending()
    tether = ShutdownConnection("127.0.0.1", port)
    waited = threading.Thread(target=tether.wait, args=(30, 30))
    waited.start()
    # The leader is still there.
    waited.join(0.2)
    assert waited.is_alive()
    anchor.close()
    waited.join(30)
    assert not waited.is_alive()


@pytest.fixture
def watched(kube):
    """A job with a heartbeat, and the variables of its leading pod."""
    annotations = {names.HEARTBEAT: "a-1"}
    job = {
        "metadata": {"name": "job", "annotations": annotations},
        "spec": {"runPolicy": {}, "tfReplicaSpecs": {}},
    }
    kube.store.create("tfjobs", NAMESPACE, job)
    place = {"namespace": NAMESPACE, "job": "job", "seconds": "1"}
    return {
        "KUBECONFIG": str(kube.kubeconfig),
        "FLOTILLA_LAUNCHER": json.dumps(place),
        "FLOTILLA_GUARD_PORT": str(free_port()),
        "TF_CONFIG": tf_config("chief"),
    }


@pytest.mark.parametrize("allowed", [True, False])
def test_a_standing_heartbeat_ends_training_with_a_checkpoint_and_the_job(
    kube, watched, tmp_path, allowed
):
    if not allowed:
        kube.faults.add("DELETE", 403)
    with guard(tmp_path, HEEDS, **watched) as process:
        # 1: the operator does not start the leader again, and the job has failed.
        assert ended(process) == 1
    words = termination.read(tmp_path)
    assert words == "the launcher has given no sign of life for 1 s; interrupted at global step 7"
    assert bool(kube.jobs()) is not allowed


def test_a_heartbeat_that_goes_on_or_cannot_be_read_ends_nothing(kube, watched, tmp_path):
    with guard(tmp_path, HEEDS, **watched) as process:
        kube.store.wait(lambda: len(kube.server.requests) >= 3)
        for number in range(2, 6):
            sign = {"metadata": {"annotations": {names.HEARTBEAT: f"a-{number}"}}}
            kube.store.patch("tfjobs", NAMESPACE, "job", sign)
            seen = len(kube.server.requests)
            kube.store.wait(lambda seen=seen: len(kube.server.requests) >= seen + 4)
        kube.server.go_down()
        kube.store.wait(lambda: kube.faults.refused.get("down", 0) >= 15)
        assert process.poll() is None
        kube.faults.clear()
        assert ended(process) == 1


def test_without_permission_the_launcher_is_not_watched_and_training_goes_on(
    kube, watched, tmp_path
):
    kube.faults.add("GET .*tfjobs", 403)
    with guard(tmp_path, HEEDS, **watched) as process:
        for line in process.stdout:
            if "the launcher is not watched" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 130


@given(st.lists(st.tuples(st.floats(0, 10), st.sampled_from(["same", "new", "silent"]))))
def test_only_time_in_which_the_same_sign_was_read_counts(course):
    now, standing, number, expected, readable = 0.0, HeartbeatAge(lambda: now), 0, 0.0, False
    for seconds, kind in course:
        now += seconds
        if kind == "silent":
            standing.unreadable()
            readable = False
            continue
        number += kind == "new"
        expected = 0.0 if kind == "new" else expected + seconds * readable
        found = standing.read(f"sign-{number}")
        if not readable and expected == 0.0:
            assert found >= 0.0
        assert abs(found - expected) < 1e-6
        readable = True
