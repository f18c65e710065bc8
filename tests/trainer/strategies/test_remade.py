"""A server of TensorFlow's is killed and started again, under a chief that goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import tensorflow as tf

from trainer.cluster.local import HOST, free_port
from trainer.errors import ClusterLostError
from trainer.strategies.remade import Remade, connect_again

pytestmark = pytest.mark.cluster

CHIEF = "tests.trainer.strategies.remade_chief"

SERVER = """
import json, sys
import tensorflow as tf
spec, role, index = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
server = tf.distribute.Server(tf.train.ClusterSpec(spec), job_name=role, task_index=index)
print("serves", flush=True)
server.join()
"""


# With real servers that end and come back.
@pytest.mark.slow
def test_it_gets_what_it_held_and_no_other_server_loses_anything():
    addresses = {
        role: [f"{HOST}:{free_port()}" for _ in range(count)]
        for role, count in (("chief", 1), ("ps", 2), ("worker", 2))
    }
    spec = json.dumps(addresses)

    def started(*words):
        command = [sys.executable, *words]
        process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        return process

    def said(process):
        line = process.stdout.readline()
        assert line, "it ended before"
        return json.loads(line)

    with ExitStack() as stack:
        servers = {
            (role, str(n)): started("-c", SERVER, spec, role, str(n))
            for role in ("ps", "worker")
            for n in (0, 1)
        }
        chief = started("-m", CHIEF, spec)
        before = said(chief)
        assert before == {"lost": [20, 20], "stays": [20], "applied": 20, "slots": [1]}
        lost, away = servers["ps", "0"], servers["worker", "1"]
        lost.kill()
        lost.wait()
        print("dead", file=chief.stdin, flush=True)
        assert said(chief)["error"]
        again = started("-c", SERVER, spec, "ps", "0")
        assert again.stdout.readline() == "serves\n"
        print("back", file=chief.stdin, flush=True)
        after = said(chief)
        away.kill()
        away.wait()
        print("a worker is dead", file=chief.stdin, flush=True)
        assert said(chief)["error"]
    assert after["made"] == [True, False, *[True] * 9]
    assert (after["again"], after["were_lost"]) == ([True, False], True)
    (stayed,) = after["stayed"]
    assert stayed >= 20
    assert (after["lost"], after["stays"], after["applied"]) == ([110, 210], [stayed + 10], 10)
    # The ids have the slots that were noted, and no run has the number of an earlier one.
    assert (after["slots"], after["is_later"], after["traced"]) == ([3], True, 0)


def test_what_was_forgotten_is_no_surprise_of_a_later_step(monkeypatch):
    remade = Remade([0])
    monkeypatch.setattr(remade, "was_on", lambda _device: True)
    known, forgotten = tf.Variable(1.0), tf.Variable(2.0)
    both = tf.function(lambda: known + forgotten)
    both()
    remade.variable(known)
    with pytest.raises(ClusterLostError, match="nobody knows how to make again what"):
        remade.rebind()


def test_a_coordinator_that_uses_a_worker_no_more_is_not_gone_on_with():
    cluster = SimpleNamespace(workers=[SimpleNamespace(worker_index=977)])
    with pytest.raises(ClusterLostError, match="worker-977 gets nothing to do any more"):
        connect_again(SimpleNamespace(_cluster=cluster))


def test_no_first_value_is_held_once_others_are_given():
    remade = Remade([0])
    remade.was_on = lambda _: True
    variable = tf.Variable(tf.ones([3]), trainable=False)
    assert remade.variable(variable)
    assert remade.variable(other := tf.Variable(tf.ones([3]), trainable=False))
    assert variable.numpy().tolist() == other.numpy().tolist() == [0.0] * 3
    assert remade._first._made
    remade.rebind()
    assert not remade._first._made
    # They have shared it until now.
    variable.assign_add([1.0, 2.0, 3.0])
    assert other.numpy().tolist() == [0.0] * 3
