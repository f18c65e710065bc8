"""Tests when the outer loop of one task or several ends, and which files it writes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.events import AttemptBegin, CheckpointPublished, Progress
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from flotilla.trainer.strategies.strategy import Report
from flotilla.trainer.training import recovery
from flotilla.trainer.training.loop import Hooks, Pace
from tests.trainer.counting import Counting, config_of, nothing


def measured(strategy):
    return {"loss": 1 / strategy.global_step(), "accuracy": 0.5}


@pytest.mark.parametrize("steps", [1, 10, 25])
def test_it_trains_exactly_as_long_as_was_asked(run, steps):
    assert run.train(steps=steps, keep=100) == steps
    assert run.steps()[-1] == steps
    assert run.weight(steps) == 0.5 * steps
    assert run.rows()[-1] == steps


def test_there_are_checkpoints_at_the_start_at_every_boundary_and_at_the_end(run):
    run.train(steps=35, keep=100)
    assert run.steps() == [0, 10, 20, 30, 35]
    assert [run.weight(step) for step in run.steps()] == [0, 5, 10, 15, 17.5]
    run.train(steps=40, keep=2)
    assert run.steps() == [35, 40]


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e-9, [0, 10, 20, 30, 40]), (0, [0, 40]), (1e9, [0, 40])]
)
def test_checkpoints_by_the_clock_and_by_steps(run, seconds, steps):
    run.train(steps=40, keep=100, checkpoint_every=1000, checkpoint_seconds=seconds)
    assert run.steps() == steps


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
    """Return a validation with these losses at 10, 20, ... steps."""
    return lambda strategy: {"loss": values[strategy.global_step() // 10 - 1]}


@pytest.mark.parametrize(
    ("patience", "values", "reached"),
    [
        (1, [3, 2, 2, 1, 1, 1], 30),
        (2, [3, 4, 5, 1, 1, 1], 30),
        (2, [3, 4, 2, 3, 1, 4], 60),
        (0, [3, 4, 5, 6, 7, 8], 60),
    ],
)
def test_training_stops_early_when_validation_gains_no_more(run, patience, values, reached):
    given = {"patience": patience, "validate": losses(*values), "checkpoint_every": 1000}
    assert run.train(steps=60, **given) == reached == run.rows()[-1]
    assert run.steps() == [0, reached]
    assert run.weight(reached) == 0.5 * reached


def areas(values, loss=lambda step: 1 / step):
    """Return a validation with these areas at 10, 20, ... steps and a decreasing loss."""
    return lambda strategy: {
        "loss": loss(strategy.global_step()),
        **({"auc": value} if (value := values[strategy.global_step() // 10 - 1]) else {}),
    }


AUC = {"main_metric": "auc", "directions": {"auc": "higher"}}


@pytest.mark.parametrize(
    ("values", "said", "reached", "kept"),
    [
        ([0.5, 0.9, 0.6, 0.7, 0.95], AUC, 40, 20),
        # Equal values count as an improvement while the loss decreases.
        ([0.5, 0.9, 0.9, 0.9, 0.8], AUC, 50, 40),
        # The metric is undefined on the validation examples.
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
    # A portion whose worker dies is repeated as a whole, so more updates may be applied.
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
    published = run.events(CheckpointPublished)
    assert [each.global_step for each in published] == [0, 10, 20]
    assert published[-1].uri.endswith("step-00000020")


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

    # The loop calls this function when there is a new checkpoint.
    assert run.train(steps=100, keep=100, should_stop_early=no_gain) == 20
    assert seen[:3] == [0, 10, 20]
    assert run.steps() == [0, 10, 20]


def test_inner_loop_and_note_are_watched_and_nothing_is_saved_or_validated_in_them(run):
    strategy, calls = Counting(), []

    @contextmanager
    def watch_steps():
        before = run.steps(), len(run.all_events()), len(calls)
        known = strategy.global_step()
        yield
        assert (run.steps(), len(run.all_events()), len(calls)) == before
        steps = strategy.global_step() - known
        calls.append("steps" if steps else "note")

    def validate(_strategy):
        calls.append("validate")
        return {"loss": 1.0}

    run.train(strategy, steps=20, validate=validate, watch_steps=watch_steps)
    assert calls == ["steps", "note", "validate"] * 2


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
    """Applies updates in its first inner loops, and none after that."""

    def run(self, steps):
        return super().run(steps) if self.global_step() < 20 else Report(loss=1.0)


def test_inner_loops_without_a_step_are_a_stall(run):
    with pytest.raises(ClusterLostError) as caught:
        run.train(Idle(), steps=100, stall_timeout=1)
    assert str(caught.value) == (
        "no progress for 1 s: training.strategy async_parameter_server runs, but applies no step "
        "after global step 20"
    )
    assert run.steps() == [0, 10, 20]
    assert run.rows() == [10, 20]


class GoingOn(Counting):
    """Applies three updates in each inner loop, and two more before it is idle."""

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
        """Return the variables, which may be read only while workers are idle."""
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
    given = {"checkpoint_every": 1000, "validate_every": 0}
    stop = {"should_stop": lambda: strategy.global_step() >= 24}
    assert run.train(strategy, steps=25, **given, **stop) == 25
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


SECONDS = 60


class Exchange:
    """A barrier of threads that returns the maximum of each value over all threads."""

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
    """A task whose barriers include fixed values of other tasks, from step `at` on."""

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
    """Run the loop of each task in a thread; return the result or the error of each."""

    def one(task):
        try:
            return run.train(task, should_stop=lambda: task.index == stopped, **training)
        except (UserError, ClusterLostError) as error:
            return error
        except BaseException:
            # Abort the barrier, or the other tasks would wait for this one.
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
    # The tasks exit later, when the end is recorded.
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


def test_a_callback_of_the_task_that_publishes_stops_all(run):
    callback = "tests.trainer.training.test_journal:StopsAtTwenty"
    tasks = three()
    assert train_all(run, tasks, steps=100, callbacks=[callback]) == [20, 20, 20]
    assert run.steps()[-1] == 20


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


@pytest.mark.parametrize(
    ("others", "given", "steps"),
    [
        ((0, 1, 0, 0), {"steps": 100}, [0, 10]),
        ((0, 0, 1, 0), {"steps": 30, "checkpoint_every": 1000}, [0, 10, 20, 30]),
    ],
    ids=["an early stop", "a checkpoint that is due"],
)
def test_what_another_task_decides_is_done_by_all(run, others, given, steps):
    assert run.train(WithOthers(*others, at=10), keep=9, **given) == steps[-1]
    assert run.steps() == steps


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
