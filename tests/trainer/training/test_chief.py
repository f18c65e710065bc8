"""Tests the hooks of the outer loop, lost tasks, and when a wait is a stall."""

import itertools
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from unittest.mock import create_autospec

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.cluster.lease import LeaseLostError, NoLease
from flotilla.trainer.cluster.liveness import Peers
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Capabilities, Task
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.features.dataset_spec import KIND, SCHEMA
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import Manifest
from flotilla.trainer.strategies.server_state import is_lost
from flotilla.trainer.strategies.strategy import Strategy
from flotilla.trainer.training import chief
from flotilla.trainer.training.chief import (
    StallWatch,
    _convert_lost_task,
    await_validation,
    make_hooks,
)
from flotilla.trainer.training.server import NUMBER_FILE, SHARDS
from tests.trainer.counting import Counting, config_of
from tests.trainer.objectives import NO_ROLES

MANGLED = (
    "Unable to parse request\nAdditional GRPC error information from remote target "
    "/job:worker/task:0:\n:UNKNOWN:Error received from peer {grpc_status:13}"
)
NO_HANDLE = (
    "Graph execution error:\n\nUnable to find the relevant tensor remote_handle: Op ID: 2, Output "
    "num: 0. One possible cause is that the tensor was accessed after deallocation in a "
    "distributed worker setup.\nAdditional GRPC error information from remote target "
)
NO_DEVICE = "Unknown device: /job:ps/replica:0/task:0\nfrom remote target "
ON_SERVER, ON_WORKER = (f"/job:{role}/replica:0/task:0/device:CPU:0" for role in ("ps", "worker"))
RESTARTED = (
    "Resource input tensor contains an invalid device. This might happen when the client has "
    "connected to a different cluster, or some remote workers have been restarted."
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tf.errors.UnavailableError(None, None, "ps-0 is gone"), True),
        (tf.errors.AbortedError(None, None, "begun anew"), True),
        (tf.errors.InternalError(None, None, MANGLED), True),
        (tf.errors.InternalError(None, None, "a kernel failed"), False),
        (tf.errors.InvalidArgumentError(None, None, "id 7 is outside of the table"), False),
        (tf.errors.InvalidArgumentError(None, None, NO_HANDLE + ON_SERVER), True),
        (tf.errors.InvalidArgumentError(None, None, NO_HANDLE + ON_WORKER), False),
        (tf.errors.InvalidArgumentError(None, None, NO_DEVICE + ON_SERVER), True),
        (tf.errors.InvalidArgumentError(None, None, f"{ON_SERVER} unknown device."), True),
        (tf.errors.InvalidArgumentError(None, None, f"{ON_WORKER} unknown device."), False),
        (tf.errors.InvalidArgumentError(None, None, RESTARTED), True),
        (tf.errors.ResourceExhaustedError(None, None, "out of memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_is_distinguished_from_a_mistake(error, expected):
    assert is_lost(error) is expected


def test_a_task_without_memory_ends_training_in_one_line():
    strategy = create_autospec(Strategy, instance=True)
    said = "OOM when allocating tensor with shape[4096,1000] and type float on "
    error = tf.errors.ResourceExhaustedError(None, None, f"{said}{ON_WORKER} by allocator cpu")
    refused = pytest.raises(
        UserError, match=r"^worker-0 \(CPU\) has too little memory .* \[4096, 1000\]: "
    )
    with refused, _convert_lost_task(strategy):
        raise error
    strategy.close.assert_called_once_with()


def dataset(validation):
    return Manifest(
        kind=KIND,
        fields={
            "dataset_schema": SCHEMA,
            "block_rows": 512,
            "splits": {"train": {"shards": [4]}, "validation": {"shards": [validation]}},
            "features": {
                name: FeatureSpec(shape=shape, dtype=dtype, stored="raw").to_json()
                for name, shape, dtype in (("x", [3], "float32"), ("y", [], "int64"))
            },
            **NO_ROLES,
            "inputs": ["x"],
            "targets": ["y"],
        },
    )


@pytest.fixture
def hooks():
    """Return a function that makes hooks; it also returns the objects on which they depend."""

    def build(*, validation=1, evaluator=False, patience=0, losses=()):
        checkpoints = create_autospec(Checkpoints, instance=True, lease=NoLease())
        checkpoints.read_validations.return_value = [
            {"validation_loss": -loss, "validation_accuracy": -loss} for loss in losses
        ]
        sections = {"cluster": {"evaluator": evaluator}, "training": {"patience": patience}}
        config = parse_config({**sections, "model": {"name": "softmax"}})
        stops = []
        watch = create_autospec(StallWatch, instance=True)
        made = make_hooks(config, dataset(validation), checkpoints, watch, lambda: bool(stops))
        return made, checkpoints, watch, stops

    return build


def test_a_stop_signal_is_a_stop_request(hooks):
    made, _, _, stops = hooks()
    assert not made.should_stop()
    stops.append("SIGTERM")
    assert made.should_stop()


def test_a_lost_lease_ends_training_with_its_own_error(hooks):
    made, checkpoints, _, stops = hooks()
    checkpoints.lease, checkpoints.parts = create_autospec(NoLease, instance=True), None
    checkpoints.lease.require.side_effect = LeaseLostError("taken over")
    checkpoints.require = partial(Checkpoints.require, checkpoints)
    stops.append("SIGTERM")
    with pytest.raises(LeaseLostError, match="taken over"):
        made.should_stop()


@pytest.mark.parametrize(
    ("validation", "evaluator", "validates"),
    [(1, False, True), (0, False, False), (1, True, False)],
)
def test_the_chief_validates_unless_there_is_nothing_to_measure_or_an_evaluator(
    hooks, validation, evaluator, validates
):
    made, *_ = hooks(validation=validation, evaluator=evaluator)
    assert (made.validate is not None) is validates


@pytest.mark.parametrize(
    ("evaluator", "patience", "losses", "stops"),
    [
        (True, 2, [3, 2, 2, 2], True),
        (True, 2, [3, 2, 2, 1], False),
        (True, 0, [3, 4, 5, 6], False),
        (False, 2, [3, 4, 5, 6], False),
    ],
)
def test_the_evaluator_s_validations_stop_training_early(hooks, evaluator, patience, losses, stops):
    made, *_ = hooks(evaluator=evaluator, patience=patience, losses=losses)
    assert made.should_stop_early() is stops


def test_steps_are_watched_for_a_stall(hooks):
    entered = []

    @contextmanager
    def stepping():
        entered.append("steps")
        yield

    made, _, watch, _ = hooks()
    watch.stepping.side_effect = stepping
    with made.watch_steps():
        assert entered == ["steps"]


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Return a function that lists batches of worker 1 of 2, whose shard has 20 examples."""
    numbers = np.arange(20)
    features = {each: FeatureSpec(shape=(), dtype="int64", stored="int") for each in ("x", "y")}
    (tmp_path / SHARDS).mkdir()
    write_shards(tmp_path / SHARDS, "train", features, {"x": numbers, "y": numbers})
    (tmp_path / NUMBER_FILE).write_text("1", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    manifest = dataset(0)
    manifest.fields["splits"]["train"]["shards"] = [20, 20]
    manifest.fields["features"] = {name: each.to_json() for name, each in features.items()}

    def batches(start, count, **training):
        training = {"batch_size": 4, **training}
        config = parse_config({"cluster": {"workers": 2}, "training": training})
        checkpoints = create_autospec(Checkpoints, instance=True, lease=NoLease())
        watch = create_autospec(StallWatch, instance=True)
        made = make_hooks(config, manifest, checkpoints, watch, lambda: False)
        taken = made.make_problem(start).batches().take(count)
        return [tuple(values.numpy().tolist()) for values, _ in taken]

    return batches


@pytest.mark.parametrize(
    ("updates", "before"), [({}, 3), ({"pull_every": 2}, 6), ({"accumulate": 3}, 9)]
)
def test_an_asynchronous_attempt_goes_on_in_the_examples(worker, updates, before):
    # Each of the two workers has made half of the 6 updates.
    assert worker(6, 9, **updates) == worker(0, 18, **updates)[before : before + 9]


def test_an_attempt_of_another_strategy_shuffles_anew(worker):
    first, resumed = (worker(start, 5, strategy="sync_parameter_server") for start in (0, 5))
    assert first != resumed
    assert {*itertools.chain(*first)} == {*itertools.chain(*resumed)} == set(range(20))


def test_before_a_task_is_forked_tensorflow_has_not_begun_and_scikit_learn_is_not_loaded():
    # `prepare` keeps Keras from importing scikit-learn.
    code = f"""
import importlib, sys
from flotilla.trainer.runtime import tensorflow_import
tensorflow_import.prepare()
for module in {sorted(set(MODULES.values()))}:
    importlib.import_module(module)
from tensorflow.python.eager import context
print(context.context()._initialized, sorted({{"sklearn", "pandas"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False []\n"


@pytest.fixture
def published(tmp_path):
    """Return the checkpoints of a run whose last checkpoint is published."""
    (tmp_path / "a").write_text("1")
    last = storage.publish(tmp_path, f"{tmp_path.as_uri()}-last", kind="checkpoint", fields={})
    made = create_autospec(Checkpoints, instance=True, last=f"{tmp_path.as_uri()}-last")
    return made, {"global_step": 9, "created": last.created}


def test_the_chief_waits_until_the_last_checkpoint_is_measured(published):
    checkpoints, last = published
    before = {"global_step": 0, "created": "2026"}
    checkpoints.read_validations.side_effect = [[], [before], [before], [before, last]]
    await_validation(checkpoints, lambda: False, poll=0)
    assert checkpoints.read_validations.call_count == 4


@pytest.mark.parametrize(("stops", "left"), [(True, 0), (False, 1)])
def test_an_evaluator_that_never_measures_is_left(published, monkeypatch, stops, left):
    checkpoints, _ = published
    checkpoints.read_validations.return_value = []
    monkeypatch.setattr(chief, "EVALUATION_SECONDS", 0)
    seen = []
    with events.listen(seen.append):
        await_validation(checkpoints, lambda: stops, poll=0)
    assert [type(each) for each in seen] == [events.EvaluatorLeft] * left


PS, ONE, TWO = (
    Task(role=role, index=index) for role, index in (("ps", 0), ("worker", 1), ("worker", 2))
)


class EndedError(Exception):
    """Raised instead of ending the process."""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Return a function from peers to the message that ends the process, or ""."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))

    def end(code):
        assert code == 138
        raise EndedError

    monkeypatch.setattr("flotilla.trainer.training.chief.os._exit", end)

    def judge(peers, *, spares=False, state="steps", moved=False, waits=2):
        strategy = Counting()
        strategy.config = config_of(stall_timeout=30)
        strategy.capabilities = Capabilities(spares_workers=spares)
        strategy.warming = state == "another graph"

        def look():
            if moved:
                watch._moved.set()
            return peers

        watch = StallWatch(strategy, look, tmp_path)
        if state != "first step":
            with watch.stepping():
                pass
        watch._moved.clear()
        if state != "validates":
            watch._stepping.set()
        try:
            for _ in range(waits):
                watch._judge()
        except EndedError:
            return (tmp_path / "termination.txt").read_text(encoding="utf-8").strip()
        return ""

    judge.events = lambda: [list(event.tasks) for event in events.read(path)]
    return judge


@pytest.mark.parametrize("state", ["steps", "validates"])
def test_one_that_does_not_answer_is_named(judged, capsys, state):
    words = judged(Peers(silent=(ONE,)), state=state)
    assert words == "no progress for 30 s: worker-1 does not answer"
    assert capsys.readouterr().err == f"flotilla: {words}\n"
    assert judged(Peers(silent=(ONE, TWO))).endswith(": worker-1, worker-2 do not answer")
    assert judged.events() == [["worker-1"], ["worker-1", "worker-2"]]


def test_a_strategy_that_spares_workers_only_says_so(judged):
    assert judged(Peers(silent=(ONE,)), spares=True, waits=1) == ""
    assert judged.events() == [["worker-1"]]
    assert judged(Peers(silent=(PS, ONE)), spares=True).endswith("ps-0, worker-1 do not answer")


def test_where_all_answer_steps_that_do_not_come_are_a_stall(judged):
    words = judged(Peers())
    assert words == (
        "no progress for 60 s: every task responds; raise training.stall_timeout if a step takes "
        "longer"
    )
    # A restarted task may not have reached its first step.
    assert not judged(Peers(), waits=1)
    assert judged(Peers(), spares=True)
    # Steps do not advance during a validation or while a graph is compiled.
    assert not judged(Peers(), state="validates")
    assert not judged(Peers(), state="first step")
    assert not judged(Peers(), state="another graph")


def test_one_that_is_gone_is_waited_for(judged):
    assert not judged(Peers(gone=(ONE,)))
    assert judged(Peers(gone=(ONE,), silent=(TWO,)))


def test_a_step_that_comes_while_others_are_asked_is_none(judged):
    assert not judged(Peers(silent=(ONE,)), moved=True)
    assert judged.events() == []
