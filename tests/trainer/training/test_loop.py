"""The outer loop: how far it trains, what it leaves on the way, and how an attempt begins again."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.counting import CHANCE_LOSS, Counting, Run, config_of, nothing
from tests.trainer.objectives import of_classes
from tests.trainer.plain import CHIEF, CLASSES, NOBODY, Plain, dense, examples, problem_of
from trainer import events, storage
from trainer.checkpoints.checkpoints import restore_model
from trainer.checkpoints.history import read_history
from trainer.checkpoints.index import index_of
from trainer.config.load import parse_config
from trainer.config.schema import TrainingConfig
from trainer.errors import ClusterLostError, RunInterruptedError, UserError
from trainer.events import AttemptBegin, CheckpointPassedOver, CheckpointPublished, Progress
from trainer.models.registry import freeze
from trainer.strategies.server_state import ServerState
from trainer.strategies.strategy import Report, create
from trainer.strategies.updates import averaging
from trainer.topology import Capabilities
from trainer.training import recovery
from trainer.training.loop import DIVERGED, Hooks, Pace

METRICS = {"global_step", "loss", "learning_rate", "steps_per_second", "seconds"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)


def measured(strategy):
    return {"loss": 1 / strategy.global_step(), "accuracy": 0.5}


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 25, 100])
def test_it_trains_exactly_as_long_as_was_asked(run, steps):
    assert run.train(steps=steps, keep=100) == steps
    assert run.steps()[-1] == steps
    assert run.weight(steps) == 0.5 * steps
    assert run.rows()[-1] == steps


def test_there_are_checkpoints_at_the_start_at_every_boundary_and_at_the_end(run):
    run.train(steps=35, keep=100)
    assert run.steps() == [0, 10, 20, 30, 35]
    assert [run.weight(step) for step in run.steps()] == [0, 5, 10, 15, 17.5]


def test_the_end_on_a_boundary_is_saved_once(run):
    run.train(steps=20, keep=100)
    assert [each.global_step for each in run.events(CheckpointPublished)] == [0, 10, 20]


@pytest.mark.parametrize(("keep", "left"), [(1, [35]), (2, [30, 35]), (3, [20, 30, 35])])
def test_only_the_newest_are_kept(run, keep, left):
    run.train(steps=35, keep=keep)
    assert run.steps() == left


def test_checkpoints_by_the_clock_and_by_steps(run):
    run.train(steps=40, keep=100, checkpoint_every=1000, checkpoint_seconds=1e-9)
    assert run.steps() == [0, 10, 20, 30, 40]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 1e9])
def test_no_checkpoint_by_a_clock_that_has_not_struck(run, seconds):
    run.train(steps=40, keep=100, checkpoint_every=1000, checkpoint_seconds=seconds)
    assert run.steps() == [0, 40]


def test_a_checkpoint_says_what_it_is(run):
    run.train(steps=25, keep=100, batch_size=32, validate=measured)
    fields = run.fields(20)
    assert fields["global_step"] == 20
    assert fields["strategy"] == "async_parameter_server"
    assert "input_position" not in fields
    assert fields["metrics"]["validation_loss"] == 1 / 20
    assert fields["metrics"]["loss"] == 1.0
    config = config_of(steps=25, keep=100, batch_size=32)
    assert fields["config_hash"] == config.digest()
    assert run.fields(0)["metrics"] == {}


def test_the_history_has_a_row_for_every_look(run):
    run.train(Counting(lambda strategy: 1 / strategy.global_step()), steps=30)
    assert run.rows() == [10, 20, 30]
    assert run.rows("loss") == [1 / 10, 1 / 20, 1 / 30]
    assert run.rows("learning_rate") == [0.5] * 3
    first = run.events(Progress)[0]
    assert {name: getattr(first, name) for name in ("global_step", "loss", "learning_rate")} == {
        "global_step": 10, "loss": 1 / 10, "learning_rate": 0.5,
    }  # fmt: skip
    assert first.seconds == run.rows("seconds")[0]
    seconds = run.rows("seconds")
    assert seconds == sorted(seconds)
    assert all(value > 0 for value in run.rows("steps_per_second"))


def test_further_metrics_of_a_strategy_stand_in_its_row(run):
    class Telling(Counting):
        def run(self, steps):
            workers = {"worker-0": {"local_steps": steps, "examples": 64 * steps}}
            return Report(loss=super().run(steps).loss, metrics={"workers": workers})

    run.train(Telling(), steps=10)
    assert run.rows("workers") == [{"worker-0": {"local_steps": 10, "examples": 640}}]
    assert run.events(Progress)[0].metrics["workers"] == run.rows("workers")[0]
    assert run.fields(10)["metrics"]["workers"] == run.rows("workers")[0]


def test_the_metrics_reach_tensorboard(run):
    run.train(steps=10)
    assert list((run.folder / "checkpoints" / "logs").glob("*/train/events.out.tfevents.*"))


def test_validation_at_every_boundary_and_at_the_end(run):
    run.train(steps=25, validate=measured, checkpoint_every=5)
    assert run.rows() == [5, 10, 15, 20, 25]
    assert run.rows("validation_loss") == [1 / 10, 1 / 20, 1 / 25]
    assert run.rows("validation_accuracy") == [0.5] * 3


@pytest.mark.parametrize("validate", [None, measured])
def test_no_validation_where_none_was_asked(run, validate):
    every = 10 if validate is None else 0
    run.train(steps=20, validate=validate, validate_every=every)
    assert run.rows() == [10, 20]
    assert run.rows("validation_loss") == []


def losses(*values):
    """A validation that gives these losses at 10, 20, ... steps."""
    return lambda strategy: {"loss": values[strategy.global_step() // 10 - 1]}


@pytest.mark.parametrize(
    ("patience", "values", "reached"),
    [
        (1, [3, 2, 2, 1, 1, 1], 30),
        (2, [3, 2, 2, 1, 1, 1], 60),
        (2, [3, 4, 5, 1, 1, 1], 30),
        (2, [3, 4, 2, 3, 1, 4], 60),
        (3, [3, 4, 5, 6, 1, 1], 40),
        (0, [3, 4, 5, 6, 7, 8], 60),
    ],
)
def test_training_stops_early_when_validation_gains_no_more(run, patience, values, reached):
    given = {"patience": patience, "validate": losses(*values), "checkpoint_every": 1000}
    assert run.train(steps=60, **given) == reached == run.rows()[-1]
    assert run.steps() == [0, reached]
    assert run.weight(reached) == 0.5 * reached


def areas(values, loss=lambda step: 1 / step):
    """A validation that gives these areas at 10, 20, ... steps, with a loss that goes down."""
    return lambda strategy: {
        "loss": loss(strategy.global_step()),
        **({"auc": value} if (value := values[strategy.global_step() // 10 - 1]) else {}),
    }


AUC = {"main_metric": "auc", "directions": {"auc": "higher"}}


@pytest.mark.parametrize(
    ("values", "said", "reached", "kept"),
    [
        ([0.5, 0.9, 0.6, 0.7, 0.95], AUC, 40, 20),
        # Equal ones gain as long as the loss goes down.
        ([0.5, 0.9, 0.9, 0.9, 0.8], AUC, 50, 40),
        # It is not defined on what is validated.
        ([None] * 5, AUC, 50, 50),
        ([None, None, 0.2, 0.1, 0.1], AUC, 50, 30),
        ([0.9, 0.8, 0.7, 0.6, 0.5], {**AUC, "directions": {"auc": "lower"}}, 50, 50),
        ([0.9, 0.8, 0.7, 0.6, 0.5], {}, 50, 50),
    ],
)
def test_validations_are_compared_by_the_main_metric(run, values, said, reached, kept):
    given = {"patience": 2, "validate": areas(values), "judged_by": lambda: said}
    assert run.train(steps=50, keep=1, **given) == reached
    assert run.steps() == sorted({kept, reached})
    assert run.fields(reached).get("main_metric") == said.get("main_metric")


def test_updates_beyond_what_was_asked_are_counted_and_reported(run):
    # A portion whose worker dies is run again as a whole.
    assert run.train(Counting(beyond=3), steps=30, keep=100, validate=measured) == 33
    assert run.steps() == [0, 13, 23, 33]
    assert run.rows("validation_loss") == [1 / 13, 1 / 23, 1 / 33]
    assert run.weight(33) == 16.5


def test_progress_is_emitted_during_training(run):
    run.train(steps=20)
    (attempt,) = run.events(AttemptBegin)
    assert (attempt.global_step, attempt.steps, attempt.resumed) == (0, 20, False)
    progress = run.events(Progress)
    assert [each.global_step for each in progress] == [10, 20]
    assert {each.steps for each in progress} == {20}
    assert progress[-1].seconds_left == 0.0
    assert run.events(CheckpointPublished)[-1].uri.endswith("step-00000020")


training = st.builds(
    TrainingConfig,
    steps=st.integers(1, 10**6),
    checkpoint_every=st.integers(1, 10**5),
    validate_every=st.integers(0, 10**5),
)


@settings(deadline=None)
@given(training, st.floats(0, 1e7), st.data())
def test_an_inner_loop_goes_forward_and_over_no_boundary(options, speed, data):
    step = data.draw(st.integers(0, options.steps - 1))
    pace = Pace(training=options, steps_per_second=speed)
    steps = pace.next_steps(step)
    assert 0 < steps <= max(20, speed)
    after = step + steps
    assert after <= options.steps
    for every in (options.checkpoint_every, options.validate_every):
        assert not every or after <= (step // every + 1) * every


def test_an_inner_loop_is_as_long_as_the_speed_allows():
    options = TrainingConfig(steps=10**6, checkpoint_every=10**6, validate_every=0)
    lengths = [Pace(training=options, steps_per_second=s).next_steps(0) for s in (0, 10, 400, 1000)]
    assert lengths == [20, 20, 400, 1000]


def test_it_ends_when_another_task_s_validations_say_so(run):
    seen = []

    def no_gain():
        seen.append(run.steps()[-1])
        return len(seen) == 3

    # Asked when there is a new checkpoint.
    assert run.train(steps=100, keep=100, should_stop_early=no_gain) == 20
    assert seen[:3] == [0, 10, 20]
    assert run.steps() == [0, 10, 20]


def test_the_inner_loop_is_watched_and_nothing_is_saved_logged_or_validated_in_it(run):
    strategy, calls = Counting(), []

    @contextmanager
    def watch_steps():
        before = run.steps(), run.rows(), len(run.all_events()), len(calls)
        yield
        calls.append("steps")
        assert (run.steps(), run.rows(), len(run.all_events()), len(calls) - 1) == before

    def validate(_strategy):
        calls.append("validate")
        return {"loss": 1.0}

    run.train(strategy, steps=20, validate=validate, watch_steps=watch_steps)
    assert calls == ["steps", "validate"] * 2


def test_a_stop_request_is_noticed_at_the_next_barrier_and_saved_first(run):
    strategy = Counting()

    def should_stop():
        return strategy.global_step() >= 10

    with pytest.raises(RunInterruptedError, match=r"at global step 10; checkpoint .*/step-0+10$"):
        run.train(strategy, steps=30, keep=9, should_stop=should_stop)
    assert run.steps() == [0, 10]
    assert run.weight(10) == 5.0


def test_a_hook_that_raises_ends_training_without_another_checkpoint(run):
    strategy = Counting()

    def should_stop():
        if strategy.global_step() >= 15:
            raise UserError("the lease is lost")
        return False

    with pytest.raises(UserError, match="the lease is lost"):
        run.train(strategy, steps=30, keep=9, checkpoint_every=10, should_stop=should_stop)
    assert run.steps() == [0, 10, 20]


def test_hooks_are_given_by_name_and_do_not_change():
    hooks = Hooks(make_problem=nothing)
    assert not hooks.should_stop()
    assert not hooks.should_stop_early()
    with hooks.watch_steps(), pytest.raises(FrozenInstanceError):
        hooks.validate = measured


class Idle(Counting):
    """Runs its first stretches, and then applies nothing."""

    def run(self, steps):
        return super().run(steps) if self.global_step() < 20 else Report(loss=1.0)


def test_inner_loops_without_a_step_are_a_stall(run):
    with pytest.raises(ClusterLostError) as caught:
        run.train(Idle(), steps=100, stall_timeout=1)
    assert str(caught.value) == (
        "no progress for 1 s: training.strategy async_parameter_server runs, and applies no step "
        "after global step 20"
    )
    assert run.steps() == [0, 10, 20]
    assert run.rows() == [10, 20]


def lost_at(step):
    """A loss that is none: the cluster goes away when `step` is reached."""

    def answer(strategy):
        if strategy.global_step() >= step:
            raise ClusterLostError("a parameter server is gone")
        return 1.0

    return answer


def one_attempt(run, *, until, **training):
    """Train until the cluster is lost, some steps after the last checkpoint."""
    with pytest.raises(ClusterLostError, match="a parameter server is gone"):
        run.train(Counting(lost_at(until)), steps=100, keep=100, **training)


def test_it_goes_on_from_the_newest_checkpoint(run):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    assert run.steps() == [0, 20]
    assert run.train(steps=50, keep=100) == 50
    assert run.steps() == [0, 20, 30, 40, 50]
    assert run.weight(50) == 25.0
    first, second = run.events(AttemptBegin)
    assert (first.global_step, first.resumed) == (0, False)
    assert (second.global_step, second.resumed) == (20, True)


def test_rows_after_the_checkpoint_are_made_again(run):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    assert run.rows() == [5, 10, 15, 20, 25, 30]
    run.train(Counting(0.25), steps=40)
    assert run.rows() == [5, 10, 15, 20, 30, 40]
    assert run.rows("loss") == [1.0] * 4 + [0.25] * 2
    assert run.rows("seconds") == sorted(run.rows("seconds"))


def test_the_data_of_a_new_attempt_begins_at_its_step(run):
    starts = []

    def problem(start):
        starts.append(start)
        return nothing(start)

    run.train(steps=20, make_problem=problem)
    run.train(steps=30, make_problem=problem)
    assert starts == [0, 20]


@pytest.mark.parametrize(("damaged", "start"), [([30], 20), ([20, 30], 10), ([0, 10, 20, 30], 0)])
def test_what_is_damaged_is_passed_over(run, damaged, start):
    run.train(steps=30, keep=100)
    for step in damaged:
        run.damage(step)
    assert run.train(steps=40, keep=100) == 40
    assert run.weight(40) == 20.0
    assert run.events(AttemptBegin)[-1].global_step == start
    passed = [each.uri[-8:] for each in run.events(CheckpointPassedOver)]
    assert passed == [f"{step:08d}" for step in reversed(damaged)]
    assert run.steps()[-1] == 40
    assert run.rows() == [10, 20, 30, 40]


def test_one_without_a_manifest_was_never_there(run):
    run.train(steps=30, keep=100)
    (run.folder / "checkpoints" / "step-00000030" / "MANIFEST.json").unlink()
    assert run.train(steps=30, keep=100) == 30
    assert run.events(AttemptBegin)[-1].global_step == 20
    assert run.steps() == [0, 10, 20, 30]


def test_an_attempt_after_only_damaged_ones_keeps_its_own(run):
    run.train(steps=30, keep=2)
    for step in (20, 30):
        run.damage(step)
    with pytest.raises(ClusterLostError):
        run.train(Counting(lost_at(15)), steps=30, keep=2)
    run.train(steps=30, keep=2)
    assert [each.global_step for each in run.events(AttemptBegin)] == [0, 0, 10]
    assert run.steps() == [20, 30]


def written(run):
    files = run.folder.glob("checkpoints/step-*/*")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("steps", [20, 15, 1])
def test_steps_that_are_reached_already_leave_nothing_to_do(run, steps):
    run.train(steps=20, keep=100)
    before = written(run)
    assert run.train(Counting(lost_at(0)), steps=steps, keep=100) == 20
    assert written(run) == before
    assert run.steps() == [0, 10, 20]
    assert run.rows() == [10, 20]


def stop_after(looks):
    """An end that is asked for before the look at the world after so many."""
    asked = iter([False] * looks)
    return lambda: next(asked, True)


@pytest.mark.parametrize(("looks", "step"), [(0, 0), (1, 5), (3, 15), (4, 20)])
def test_an_end_that_is_asked_for_leaves_a_last_checkpoint(run, looks, step):
    with pytest.raises(RunInterruptedError) as caught:
        run.train(steps=100, should_stop=stop_after(looks), validate_every=5, keep=100)
    assert caught.value.exit_code == 130
    assert str(caught.value).startswith(f"interrupted at global step {step}; checkpoint file://")
    assert str(caught.value).endswith(f"step-{step:08d}")
    assert run.steps()[-1] == step
    assert run.weight(step) == 0.5 * step
    assert run.train(steps=30, keep=100) == 30
    assert run.events(AttemptBegin)[-1].global_step == step
    assert run.weight(30) == 15.0


def test_an_end_that_is_asked_for_at_the_end_is_an_end(run):
    assert run.train(steps=20, should_stop=stop_after(2)) == 20


def test_a_lost_cluster_is_not_handled_by_the_loop(run):
    with pytest.raises(ClusterLostError) as caught:
        run.train(Counting(lost_at(0)), steps=20)
    assert caught.value.exit_code == 138
    assert run.steps() == [0]


@pytest.mark.parametrize("until", [15, 25, 35, 45])
def test_early_stopping_counts_over_attempts(run, until):
    values = dict(zip((10, 20, 30, 40, 50), (3, 4, 2, 5, 6), strict=True))
    given = {"patience": 2, "validate": lambda strategy: {"loss": values[strategy.global_step()]}}
    with pytest.raises(ClusterLostError):
        run.train(Counting(lost_at(until)), steps=90, **given)
    assert run.train(steps=90, **given) == 50
    assert run.rows("validation_loss") == [3, 4, 2, 5, 6]


@pytest.fixture
def left(monkeypatch):
    """Let an attempt find what was left at a global step; return what else was asked for."""
    asked = []

    def of_step(step, seconds=0.0):
        def state_of(strategy, _uri):
            def is_taken(_device):
                strategy.counter.assign(step)
                strategy.weight.assign(0.5 * step)
                return True

            state = create_autospec(ServerState, instance=True, servers={0}, living={0}, taken={0})
            state.found = {0: SimpleNamespace(held=1, saved=-1)}
            state.reached.return_value = step
            state.go_on_with.side_effect = lambda servers: asked.append(sorted(servers))
            state.is_taken.side_effect = is_taken
            state.seconds_since_save.return_value = seconds
            state.back_to.return_value = {}
            state.forget.side_effect = lambda: asked.append("end")
            return state

        monkeypatch.setattr(Counting, "find_state", state_of)
        monkeypatch.setattr(Counting, "capabilities", Capabilities(mixes_steps=True))
        return asked

    return of_step


def test_an_attempt_goes_on_with_what_was_left(run, left):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    asked, starts = left(27), []

    def problem(start):
        starts.append(start)
        return nothing(start)

    assert run.train(steps=50, keep=100, validate_every=0, make_problem=problem) == 50
    assert (starts, asked) == ([27], [[0], "end"])
    *_, event = run.events(AttemptBegin)
    assert (event.global_step, event.resumed, event.checkpoint) == (27, True, 20)
    assert run.weight(50) == 25.0
    # Nothing was due.
    assert run.steps() == [0, 20, 30, 40, 50]
    # The rows that were written up to there stay.
    assert run.rows() == [5, 10, 15, 20, 25, 30, 40, 50]
    assert [each.checkpoint for each in run.events(AttemptBegin)[:-1]] == [-1]


@pytest.mark.parametrize(("seconds", "saves"), [(61.0, [47]), (59.0, [])])
def test_what_is_due_by_the_clock_is_saved_when_workers_are_at_work(run, left, seconds, saves):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    left(27, seconds)
    run.train(steps=50, keep=100, validate_every=0, checkpoint_every=50, checkpoint_seconds=60.0)
    assert run.steps() == [0, 20, *saves, 50]


@pytest.mark.parametrize("step", [20, 24])
def test_what_was_due_before_a_chief_died_is_made_up(run, left, step):
    def validate(strategy):
        validated.append(strategy.global_step())
        return lost_at(20)(strategy) and {"loss": 50.0 - validated[-1]}

    validated = []
    with pytest.raises(ClusterLostError):
        run.train(steps=40, keep=100, validate=validate)
    assert run.steps() == [0, 10]
    left(step)
    validated.clear()
    run.train(
        steps=40,
        keep=100,
        validate=lambda strategy: validated.append(strategy.global_step()) or {"loss": 1.0},
    )
    assert validated == [step, 30, 40]
    assert run.steps() == [0, 10, step, 30, 40]
    # It is no validation of the checkpoint before.
    losses = {each.global_step: each.loss for each in index_of(run.uri)}
    assert losses[10] == 40.0
    assert run.rows("validation_loss") == [40.0, 1.0, 1.0, 1.0]


def test_a_validation_of_an_earlier_step_is_none_of_what_is_left(run, left):
    given = {"checkpoint_every": 20, "validate": lambda _strategy: {"loss": 1.0}}
    one_attempt(run, until=15, **given)
    assert (run.steps(), run.rows("validation_loss")) == ([0], [1.0])
    left(15)
    with pytest.raises(RunInterruptedError):
        run.train(steps=40, keep=100, should_stop=lambda: True, **given)
    assert {each.global_step: each.loss for each in index_of(run.uri)} == {0: None, 15: None}
    assert run.fields(15)["metrics"]["loss"] == 1.0


def test_what_is_left_past_the_end_is_the_last_checkpoint(run, left):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    left(27)
    assert run.train(steps=25, keep=100, validate_every=0) == 27
    assert run.steps() == [0, 20, 27]


@pytest.mark.parametrize(
    ("error", "ended"), [(ClusterLostError("ps-1"), []), (UserError("the loss"), ["end"])]
)
def test_what_is_on_the_servers_stays_where_another_attempt_may_need_it(run, left, error, ended):
    run.train(steps=10)

    def fails(_):
        raise error

    asked = left(15)
    with pytest.raises(type(error)):
        run.train(Counting(fails), steps=40)
    assert asked == [[0], *ended]


@pytest.mark.parametrize(
    ("error", "ended"), [(ClusterLostError("ps-1"), []), (UserError("the model"), ["end"])]
)
def test_an_attempt_that_does_not_begin_leaves_nothing(run, monkeypatch, error, ended):
    class Fails(Counting):
        def build(self, _problem):
            raise error

    asked = []
    state = create_autospec(ServerState, instance=True, found={})
    state.forget.side_effect = lambda: asked.append("end")
    monkeypatch.setattr(Counting, "find_state", lambda _self, _uri: state)
    with pytest.raises(type(error)):
        run.train(Fails(), steps=10)
    assert asked == ended


def test_averages_in_the_place_of_weights_are_nothing_to_go_on_from(run, monkeypatch):
    class Reporting(Counting):
        def settle(self, *, is_whole):
            reported.append(is_whole)

    reported = []
    monkeypatch.setattr(averaging, "_exchange", lambda _: reported.append("exchanged"))
    run.train(Reporting(), steps=10, ema=0.5, validate=lambda _: {"loss": 1.0})
    assert reported == [True, False, "exchanged", "exchanged", True]


def test_a_run_that_stopped_early_stays_stopped(run):
    given = {"patience": 1, "validate": lambda _strategy: {"loss": 1.0}}
    assert run.train(steps=90, **given) == 20
    assert run.train(steps=90, **given) == 20
    assert run.rows() == [10, 20]
    assert run.steps()[-1] == 20


def test_a_checkpoint_of_something_else_is_not_trained_on(run):
    class Other(Counting):
        def variables(self):
            return {"model/other": self.weight, "global_step": self.counter}

    run.train(steps=10)
    with pytest.raises(UserError, match="does not fit model and optimizer of the configuration"):
        run.train(Other(), steps=20)
    assert run.steps() == [0, 10]


SECONDS = 60


class Exchange:
    """A barrier of threads, at which each takes the largest of all values."""

    def __init__(self, tasks):
        self._barrier = threading.Barrier(tasks)
        self._values = {}

    def largest(self, index, values):
        self._values[index] = values
        self._barrier.wait(SECONDS)
        largest = tuple(max(each) for each in zip(*self._values.values(), strict=True))
        self._barrier.wait(SECONDS)
        return largest

    def abort(self):
        self._barrier.abort()


class Peer(Counting):
    """One of several tasks that run the outer loop, each in a thread; task 0 publishes."""

    def __init__(self, exchange, index, loss=1.0):
        super().__init__(loss)
        self.exchange, self.index, self.left = exchange, index, 0

    @property
    def publishes(self):
        return self.index == 0

    def barrier(self, *values):
        return self.exchange.largest(self.index, values)

    def leave(self):
        self.left += 1


class WithOthers(Counting):
    """A task whose others give fixed values at the barrier of a step, from step `at` on."""

    def __init__(self, *others, publishes=True, at=0):
        super().__init__()
        self.others, self._publishes, self.at, self.left = others, publishes, at, []

    @property
    def publishes(self):
        return self._publishes

    def barrier(self, *values):
        others = self.others if len(values) == 4 and self.global_step() >= self.at else values
        return tuple(max(pair) for pair in zip(values, others, strict=True))

    def leave(self):
        self.left.append(self.global_step())


def train_all(run, tasks, *, stopped=None, **training):
    """Run the loop of each task in a thread; return what each returned or raised."""

    def one(task):
        try:
            return run.train(task, should_stop=lambda: task.index == stopped, **training)
        except (UserError, ClusterLostError) as error:
            return error
        except BaseException:
            # The others would wait for this one.
            task.exchange.abort()
            raise

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(one, tasks))


def three(loss=1.0):
    exchange = Exchange(3)
    return [Peer(exchange, index, loss) for index in range(3)]


def test_all_reach_the_end_and_one_keeps_the_journal(run):
    tasks = three()
    assert train_all(run, tasks, steps=25, keep=100) == [25, 25, 25]
    assert run.steps() == [0, 10, 20, 25]
    assert run.rows() == [10, 20, 25]
    assert len(run.events(AttemptBegin)) == 1
    assert [each.global_step for each in run.events(CheckpointPublished)] == [0, 10, 20, 25]
    # They leave when the end is on record.
    assert [task.left for task in tasks] == [0, 0, 0]


def test_all_resume_from_the_same_checkpoint(run):
    train_all(run, three(), steps=15, keep=100)
    assert train_all(run, three(), steps=30, keep=100) == [30, 30, 30]
    assert [each.global_step for each in run.events(AttemptBegin)] == [0, 15]
    assert run.weight(30) == 15.0


@pytest.mark.parametrize("asked", [0, 2])
def test_a_stop_request_to_one_stops_all(run, asked):
    tasks = three()
    ended = train_all(run, tasks, stopped=asked, steps=100)
    assert {type(each) for each in ended} == {RunInterruptedError}
    said = {str(each) for each in ended}
    assert len(said) == 1
    assert said.pop().endswith(f"checkpoint {run.uri}/step-00000000")
    assert [task.left for task in tasks] == [1, 1, 1]


def test_a_task_that_does_not_publish_writes_nothing(run):
    task = WithOthers(0, 0, 0, 0, publishes=False)
    assert run.train(task, steps=25) == 25
    assert run.steps() == []
    assert read_history(run.uri) == []
    assert not (run.folder / "events.jsonl").exists()


def test_a_task_that_does_not_publish_names_the_last_checkpoint(run):
    task = WithOthers(0, 0, 0, 0, publishes=False)
    with pytest.raises(RunInterruptedError, match=r"at global step 20; .*/step-00000020$"):
        run.train(task, steps=100, should_stop=lambda: task.global_step() >= 20)


def test_an_early_stop_of_one_stops_all(run):
    task = WithOthers(0, 1, 0, 0, at=10)
    assert run.train(task, steps=100, keep=9) == 10
    assert run.steps() == [0, 10]


def test_a_checkpoint_that_is_due_on_another_task_is_saved(run):
    run.train(WithOthers(0, 0, 1, 0, at=10), steps=30, keep=9, checkpoint_every=1000)
    assert run.steps() == [0, 10, 20, 30]


def test_the_longest_inner_loop_is_run_by_all(run):
    run.train(WithOthers(0, 0, 0, 7), steps=21, validate_every=0, checkpoint_every=3)
    assert run.rows()[:2] == [7, 14]


def test_tasks_that_found_different_checkpoints_begin_again(run):
    class OtherCheckpoint(Counting):
        def barrier(self, *values):
            return tuple(max(value, 20) for value in values)

    with pytest.raises(ClusterLostError, match="found different checkpoints"):
        run.train(OtherCheckpoint(), steps=30)
    assert run.steps() == []


def test_a_task_that_diverges_does_not_wait_for_the_others(run):
    task = WithOthers(0, 0, 0, 0)
    task._loss = float("nan")
    with pytest.raises(UserError, match="the loss is nan"):
        run.train(task, steps=30)
    assert task.left == []
    assert run.steps() == [0]


MOST = DIVERGED * CHANCE_LOSS


def refused(run, *args, **options):
    with pytest.raises(UserError) as caught:
        run.train(*args, steps=100, keep=100, **options)
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert len(message.splitlines()) == 1
    assert message.startswith("training diverged: ")
    assert "lower training.optimizer.learning_rate or clip the gradient" in message
    return message


def from_step(step, answer):
    return lambda strategy: answer(strategy) if strategy.global_step() >= step else 1.0


def poison(value):
    def answer(strategy):
        strategy.weight.assign(value)
        return 1.0

    return answer


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (math.nan, "the loss is nan"),
        (math.inf, "the loss is inf"),
        (MOST * 1.01, "the loss is 20200"),
    ],
)
def test_a_loss_that_is_none(run, loss, said):
    message = refused(run, Counting(from_step(25, lambda _: loss)), validate_every=5)
    assert message.startswith(f"training diverged: {said} at global step 25; ")
    assert message.endswith(f"(the last finite checkpoint is {run.uri}/step-00000020)")
    assert run.steps() == [0, 10, 20]
    assert run.rows() == [5, 10, 15, 20]


def test_a_loss_that_never_was_finite_is_one_of_the_model(run):
    message = refused(run, Counting(lambda _: math.nan))
    assert "; look for a logarithm, a root or a division of zero, or lower training." in message


@pytest.mark.parametrize("loss", [-1.0, 0.0, MOST * 0.99])
def test_a_loss_that_is_merely_bad_or_odd(run, loss):
    assert run.train(Counting(loss), steps=20) == 20


def test_a_loss_that_is_none_at_once(run):
    message = refused(run, Counting(math.nan))
    assert message.endswith(f"(the last finite checkpoint is {run.uri}/step-00000000)")
    assert run.steps() == [0]
    assert run.rows() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_behind_a_loss_that_is(run, value):
    message = refused(run, Counting(from_step(25, poison(value))))
    assert message.startswith("training diverged: model/weight is not finite at global step 30; ")
    assert run.steps() == [0, 10, 20]


def test_a_weight_that_is_not_finite_when_an_end_is_asked_for(run):
    looks = iter([False] * 5)
    message = refused(
        run,
        Counting(from_step(25, poison(math.nan))),
        should_stop=lambda: next(looks, True),
        validate_every=5,
    )
    assert "model/weight is not finite at global step 25" in message
    assert run.steps() == [0, 10, 20]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_validation_that_is_none_behind_a_loss_that_is(run, value):
    def validate(strategy):
        return {"loss": value if strategy.global_step() >= 30 else 1.0, "accuracy": 0.5}

    message = refused(run, validate=validate)
    assert message.startswith(f"training diverged: the validation loss is {value} at global step")
    assert run.steps() == [0, 10, 20]
    assert run.rows("validation_loss") == [1.0, 1.0]


def test_what_diverged_may_be_trained_again_from_the_last_finite_checkpoint(run):
    refused(run, Counting(from_step(25, lambda _: math.nan)))
    assert run.train(steps=40, keep=100) == 40
    assert run.steps() == [0, 10, 20, 30, 40]
    assert run.weight(40) == 20.0
    assert run.rows() == [10, 20, 30, 40]


def test_an_interrupt_is_not_a_divergence(run):
    with pytest.raises(RunInterruptedError):
        run.train(steps=20, should_stop=lambda: True)
    assert run.steps() == [0]


class GoingOn(Counting):
    """It applies three updates an inner loop, goes on, and has two more when it rests."""

    def __init__(self, *, each: int = 3, more: int = 2):
        super().__init__()
        self.each, self.more = each, more
        self.goes_on, self.boundaries, self.rests = False, [], []

    def advance(self, steps, boundary):
        assert steps <= boundary - self.global_step()
        self.boundaries.append(boundary)
        self.run(min(self.each, boundary - self.global_step()))
        self.goes_on = self.global_step() < boundary
        self.boundary = boundary
        return Report(loss=1.0, global_step=self.global_step() if self.goes_on else None)

    def rest(self):
        assert self.goes_on
        self.goes_on = False
        self.run(min(self.more, self.boundary - self.global_step()))
        self.rests.append(self.global_step())
        return Report(loss=2.0)

    def variables(self):
        """Only of workers at rest."""
        assert not self.goes_on
        return super().variables()


def test_they_go_on_up_to_each_boundary_and_no_further(run):
    strategy = GoingOn()
    reached = run.train(strategy, steps=25, keep=100, validate=lambda of: {"loss": 1 - of.goes_on})
    assert reached == 25
    assert run.steps() == [0, 10, 20, 25]
    assert [run.weight(step) for step in run.steps()] == [0, 5, 10, 12.5]
    assert strategy.boundaries == [10] * 4 + [20] * 4 + [25] * 2
    assert run.rows() == [3, 6, 9, 10, 13, 16, 19, 20, 23, 25]
    assert run.rows("validation_loss") == [1, 1, 1]
    assert strategy.rests == []


def test_the_edges_of_a_profile_are_boundaries_too(run):
    strategy = GoingOn()
    run.train(strategy, steps=30, checkpoint_every=30, validate_every=0, profile=[8, 12])
    assert sorted(set(strategy.boundaries)) == [7, 12, 30]


def test_they_rest_before_the_checkpoint_of_an_interrupt(run):
    strategy = GoingOn()
    with pytest.raises(RunInterruptedError, match="global step 8;"):
        run.train(strategy, steps=25, should_stop=lambda: strategy.global_step() >= 6)
    assert strategy.rests == [8]
    assert run.steps()[-1] == run.rows()[-1] == 8
    assert run.weight(8) == 4
    assert run.rows("loss")[-1] == 2.0


def test_what_is_applied_until_they_rest_may_be_all_that_was_left(run):
    strategy = GoingOn(each=24)
    assert (
        run.train(
            strategy,
            steps=25,
            checkpoint_every=1000,
            validate_every=0,
            should_stop=lambda: strategy.global_step() >= 24,
        )
        == 25
    )
    assert run.steps() == [0, 25]


def test_they_rest_before_a_checkpoint_by_the_clock(run):
    strategy = GoingOn()
    run.train(
        strategy,
        steps=12,
        keep=100,
        checkpoint_every=1000,
        validate_every=0,
        checkpoint_seconds=1e-9,
    )
    assert run.steps() == [0, 5, 10, 12]
    assert strategy.rests == [5, 10]


def test_they_rest_where_training_stops_early(run):
    strategy = GoingOn()
    reached = run.train(
        strategy, steps=90, validate_every=0, should_stop_early=lambda: strategy.global_step() >= 10
    )
    assert reached == 10
    assert not strategy.goes_on


def test_the_seconds_of_rows_go_on_with_them(run):
    run.train(GoingOn(), steps=25)
    seconds = run.rows("seconds")
    assert all(before <= after for before, after in pairwise(seconds))
    assert all(value > 0 for value in run.rows("steps_per_second"))


def test_what_was_reached_is_noted_after_each_inner_loop_before_it_is_reported(run, monkeypatch):
    noted = []
    monkeypatch.setattr(
        recovery.Recovery, "note", lambda _self, step: noted.append((step, run.rows()))
    )
    run.train(GoingOn(), steps=16, checkpoint_every=10, validate_every=0)
    steps = [3, 6, 9, 10, 13, 16]
    assert noted == [(step, steps[:number]) for number, step in enumerate(steps)]


def measured_by_objective(strategy):
    objective = of_classes(CLASSES)
    return objective.means(
        objective.totals(strategy.model, tf.data.Dataset.from_tensors(examples())).numpy()
    )


def values(strategy):
    return {path: variable.numpy() for path, variable in strategy.variables().items()}


@pytest.mark.parametrize(
    ("optimizer", "dropout"),
    [
        pytest.param("adam", 0, marks=pytest.mark.slow),
        pytest.param("adafactor", 0, marks=pytest.mark.slow),
        ("sgd", 0.5),
    ],
)
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path, optimizer, dropout):
    problem = problem_of(partial(dense, dropout), optimizer)
    straight = Plain()
    Run(tmp_path / "straight").train(straight, steps=30, make_problem=problem)
    run = Run(tmp_path / "interrupted")
    for looks in (1, 2):
        with pytest.raises(RunInterruptedError):
            run.train(
                Plain(),
                steps=30,
                make_problem=problem,
                should_stop=stop_after(looks),
                validate_every=4,
            )
    resumed = Plain()
    assert run.train(resumed, steps=30, make_problem=problem) == 30
    expected = values(straight)
    assert values(resumed).keys() == expected.keys()
    for path, value in values(resumed).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_it_learns_and_says_so(tmp_path):
    run = Run(tmp_path)
    problem = problem_of(rate=0.05)
    run.train(
        Plain(), steps=200, make_problem=problem, validate=measured_by_objective, validate_every=50
    )
    accuracies = run.rows("validation_accuracy")
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.9
    assert run.rows("loss")[-1] < run.rows("loss")[0]
    assert run.rows("learning_rate")[-1] == pytest.approx(0.05)


def test_its_checkpoint_is_a_model_for_a_plain_process(tmp_path):
    run, strategy = Run(tmp_path), Plain()
    run.train(strategy, steps=20, make_problem=problem_of(), keep=1)
    model = dense()
    restore_model(f"{run.uri}/step-00000020", model, tmp_path / "evaluation")
    points, _ = examples()
    np.testing.assert_array_equal(model(points), strategy.model(points))


@pytest.mark.slow
def test_a_learning_rate_far_too_high_is_a_divergence(tmp_path):
    run = Run(tmp_path)
    problem = problem_of(optimizer="sgd", rate=1e30)
    with pytest.raises(UserError, match="training diverged: ") as caught:
        run.train(Plain(), steps=100, make_problem=problem)
    assert len(str(caught.value).splitlines()) == 1
    assert run.steps() == [0]


@pytest.mark.slow
def test_the_learning_rate_is_the_configurations_also_when_training_is_resumed(tmp_path):
    run, strategy = Run(tmp_path), Plain()
    run.train(Plain(), steps=10, make_problem=problem_of(rate=0.01))
    run.train(strategy, steps=20, make_problem=problem_of(rate=0.002))
    assert run.rows("learning_rate") == pytest.approx([0.01, 0.002])
    assert strategy.global_step() == 20


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"optimizer": "lion"}, r"\(it has no optimizer/lion/"),
        ({"model": partial(dense, 0.5)}, r"\(it has no model/"),
    ],
)
def test_another_model_or_optimizer_is_refused(tmp_path, other, said):
    run = Run(tmp_path)
    run.train(Plain(), steps=10, make_problem=problem_of())
    with pytest.raises(UserError, match=said):
        run.train(Plain(), steps=20, make_problem=problem_of(**other))
    assert run.steps() == [0, 10]
    assert run.rows() == [10]


MOMENTUM = 0.8
KERNEL = "dense/logits/kernel"


def train_with(run, steps, **training):
    config = parse_config({"training": {"strategy": "single", "batch_size": 4, **training}})
    strategy = create(config, NOBODY, CHIEF)
    run.train(strategy, steps=steps, make_problem=problem_of(), batch_size=4, keep=9, **training)
    return strategy


def handed_on(run, step, tmp_path):
    model = dense()
    restore_model(storage.join(run.uri, f"step-{step:08d}"), model, tmp_path / f"fetched-{step}")
    return {variable.path: variable.numpy() for variable in model.variables}


def test_a_checkpoint_has_both_and_hands_the_average_on(tmp_path):
    run = Run(tmp_path)
    train_with(run, 20, ema=MOMENTUM)
    first, last = saved(run, 0), saved(run, 20)
    np.testing.assert_array_equal(first[f"average/{KERNEL}"], first[f"model/{KERNEL}"])
    assert not np.allclose(last[f"average/{KERNEL}"], last[f"model/{KERNEL}"], atol=1e-4)
    model = handed_on(run, 20, tmp_path)
    np.testing.assert_array_equal(model[KERNEL], last[f"average/{KERNEL}"])
    # What no gradient trains has no average.
    mean = "dense/norm/moving_mean"
    np.testing.assert_array_equal(model[mean], last[f"model/{mean}"])


def test_a_resumed_run_continues_both(tmp_path):
    whole, parts = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    train_with(whole, 20, ema=MOMENTUM)
    train_with(parts, 10, ema=MOMENTUM)
    train_with(parts, 20, ema=MOMENTUM)
    expected, found = saved(whole, 20), saved(parts, 20)
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, err_msg=path)


def test_it_may_begin_and_end_with_a_later_attempt(tmp_path):
    run = Run(tmp_path)
    train_with(run, 10)
    at_first = train_with(run, 10, ema=MOMENTUM).variables()
    np.testing.assert_array_equal(
        at_first[f"average/{KERNEL}"].numpy(), saved(run, 10)[f"model/{KERNEL}"]
    )
    train_with(run, 20, ema=MOMENTUM)
    assert f"average/{KERNEL}" in saved(run, 20)
    train_with(run, 30)
    assert f"average/{KERNEL}" not in saved(run, 30)


def test_a_validation_measures_the_average_and_training_goes_on_from_the_weights(tmp_path):
    seen = []

    def validate(strategy):
        variables = strategy.variables()
        seen.append({path: each.numpy() for path, each in variables.items()})
        return {"loss": 1.0}

    run = Run(tmp_path)
    config = parse_config({"training": {"strategy": "single", "ema": MOMENTUM}})
    strategy = create(config, NOBODY, CHIEF)
    run.train(strategy, steps=10, make_problem=problem_of(), validate=validate, validate_every=10)
    (measured,) = seen
    last = saved(run, 10)
    np.testing.assert_array_equal(measured[f"model/{KERNEL}"], last[f"average/{KERNEL}"])
    np.testing.assert_array_equal(measured[f"average/{KERNEL}"], last[f"model/{KERNEL}"])


@pytest.mark.parametrize("before", ["", "float16"])
@pytest.mark.slow
def test_the_scale_is_continued_or_begun(tmp_path, before):
    run = Run(tmp_path)
    train_with(run, 10, mixed_precision=before)
    resume = partial(train_with, run, mixed_precision="float16")
    scale = resume(10).variables()["loss_scale/gradients"].numpy()
    assert scale == (10 if before else 0)
    assert resume(20).variables()["loss_scale/gradients"].numpy() == scale + 10


HIDDEN = ("dense/hidden/*",)
NORM = ("dense/norm/*",)


def frozen(globs):
    model = dense()
    freeze(model, globs)
    return model


def train_frozen(run, steps, globs=(), optimizer="adam", **named):
    """Train with these variables frozen; return the strategy."""
    strategy = Plain()
    make = problem_of(partial(frozen, globs), optimizer)
    optimizers = {"optimizer": {"name": optimizer}}
    run.train(strategy, steps=steps, make_problem=make, freeze=list(globs), **optimizers, **named)
    return strategy


def saved(run, step):
    uri = storage.join(run.uri, f"step-{step:08d}")
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    return {
        key.removeprefix("variables/").partition("/")[0].replace(".S", "/"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("variables/")
    }


def changed(before, after, part):
    return {
        path: bool((before[path] != after[path]).any())
        for path in before
        if path.startswith(f"model/dense/{part}/")
    }


def test_frozen_variables_are_in_the_checkpoint_and_have_no_slots(tmp_path):
    run = Run(tmp_path)
    train_frozen(run, 20, HIDDEN, keep=9)
    first, last = saved(run, 0), saved(run, 20)
    assert changed(first, last, "hidden") == {
        "model/dense/hidden/kernel": False,
        "model/dense/hidden/bias": False,
    }
    assert all(changed(first, last, "logits").values())
    slots = [path for path in last if path.startswith("optimizer/")]
    assert len(slots) == 2 * 4
    assert not any("hidden" in path for path in slots)
    assert run.fields(20)["freeze"] == list(HIDDEN)


@pytest.mark.slow
def test_another_list_thaws_with_new_slots_and_keeps_the_others(tmp_path, caplog):
    run = Run(tmp_path)
    train_frozen(run, 20, HIDDEN)
    before = saved(run, 20)
    resumed = train_frozen(run, 20, NORM)
    values = {path: variable.numpy() for path, variable in resumed.variables().items()}
    for path, value in values.items():
        if path in before:
            np.testing.assert_array_equal(value, before[path], err_msg=path)
    anew = [path for path in values if path not in before]
    assert len(anew) == 4
    assert all("hidden" in path and not values[path].any() for path in anew)
    assert "training.freeze has changed: 4 of 8 slots of the optimizer begin anew" in caplog.text
    train_frozen(run, 40, NORM)
    after = saved(run, 40)
    assert all(changed(before, after, "hidden").values())
    assert not any(changed(before, after, "norm").values())


@pytest.mark.slow
def test_slots_that_a_number_tells_apart_begin_anew(tmp_path):
    run = Run(tmp_path)
    train_frozen(run, 20, ("dense/hidden/kernel",), "adafactor")
    resumed = train_frozen(run, 20, (), "adafactor").variables()
    # Those of the one kernel and those of the other have the same names but for a number.
    assert not any(resumed[path].numpy().any() for path in resumed if "optimizer/kernel" in path)
    assert resumed["optimizer/adafactor/dense_logits_bias_velocity"].numpy().any()
    assert train_frozen(run, 30, (), "adafactor").global_step() == 30


def test_another_optimizer_is_refused_all_the_same(tmp_path):
    run = Run(tmp_path)
    train_frozen(run, 10, HIDDEN)
    with pytest.raises(UserError, match="does not fit model and optimizer"):
        train_frozen(run, 20, (), "lion")
