"""Tests how an attempt resumes, and how it ends if a number is not finite."""

import math
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from flotilla.trainer.checkpoints.index import read_index
from flotilla.trainer.config.topology import Capabilities
from flotilla.trainer.events import AttemptBegin, CheckpointPassedOver
from flotilla.trainer.optimizers import optimizers
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from flotilla.trainer.strategies.server_state import ServerState
from flotilla.trainer.training.loop import DIVERGED
from tests.trainer.counting import CHANCE_LOSS, Counting, nothing, stop_after


def lost_at(step):
    """Return a loss function that loses the cluster when `step` is reached."""

    def answer(strategy):
        if strategy.global_step() >= step:
            raise ClusterLostError("a parameter server is gone")
        return 1.0

    return answer


def recording():
    """Return the list of steps at which attempts begin, and the hook that appends to it."""
    starts = []
    return starts, lambda start: starts.append(start) or nothing(start)


def one_attempt(run, *, until, **training):
    """Train until the cluster is lost, some steps after the last checkpoint."""
    with pytest.raises(ClusterLostError, match="a parameter server is gone"):
        run.train(Counting(lost_at(until)), steps=100, keep=100, **training)


def test_it_goes_on_from_the_newest_checkpoint(run):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    assert run.steps() == [0, 20]
    assert run.rows() == [5, 10, 15, 20, 25, 30]
    starts, problem = recording()
    assert run.train(Counting(0.25), steps=50, keep=100, make_problem=problem) == 50
    assert starts == [20]
    assert run.steps() == [0, 20, 30, 40, 50]
    assert run.weight(50) == 25.0
    # The rows after the checkpoint are made again.
    assert run.rows() == [5, 10, 15, 20, 30, 40, 50]
    assert run.rows("loss") == [1.0] * 4 + [0.25] * 3
    assert run.rows("seconds") == sorted(run.rows("seconds"))
    first, second = run.events(AttemptBegin)
    assert (first.global_step, first.resumed) == (0, False)
    assert (second.global_step, second.resumed) == (20, True)


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


@pytest.mark.parametrize("steps", [20, 1])
def test_steps_that_are_reached_already_leave_nothing_to_do(run, steps):
    run.train(steps=20, keep=100)
    before = written(run)
    assert run.train(Counting(lost_at(0)), steps=steps, keep=100) == 20
    assert written(run) == before
    assert run.steps() == [0, 10, 20]
    assert run.rows() == [10, 20]


@pytest.mark.parametrize(("looks", "step"), [(0, 0), (3, 15)])
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


@pytest.mark.parametrize("until", [15, 35])
def test_early_stopping_counts_over_attempts(run, until):
    values = dict(zip((10, 20, 30, 40, 50), (3, 4, 2, 5, 6), strict=True))
    given = {"patience": 2, "validate": lambda strategy: {"loss": values[strategy.global_step()]}}
    with pytest.raises(ClusterLostError):
        run.train(Counting(lost_at(until)), steps=90, **given)
    assert run.train(steps=90, **given) == 50
    assert run.rows("validation_loss") == [3, 4, 2, 5, 6]


@pytest.fixture
def left(monkeypatch):
    """Return a function that simulates values of a step on a server, and returns a call log."""
    asked = []

    def of_step(step, seconds=0.0):
        def state_of(strategy, _uri):
            def is_taken(_device):
                strategy.counter.assign(step)
                strategy.weight.assign(0.5 * step)
                return True

            state = create_autospec(ServerState, instance=True, servers={0}, living={0}, taken={0})
            state.found = {0: SimpleNamespace(held=1, saved=-1)}
            state.read_reached.return_value = step
            state.select.side_effect = lambda servers: asked.append(sorted(servers))
            state.is_taken.side_effect = is_taken
            state.seconds_since_save.return_value = seconds
            state.list_reverted.return_value = {}
            state.forget.side_effect = lambda: asked.append("end")
            return state

        monkeypatch.setattr(Counting, "find_state", state_of)
        monkeypatch.setattr(Counting, "capabilities", Capabilities(mixes_steps=True))
        return asked

    return of_step


def test_an_attempt_goes_on_with_what_was_left(run, left):
    one_attempt(run, until=35, checkpoint_every=20, validate_every=5)
    asked, (starts, problem) = left(27), recording()
    assert run.train(steps=50, keep=100, validate_every=0, make_problem=problem) == 50
    assert (starts, asked) == ([27], [[0], "end"])
    *_, event = run.events(AttemptBegin)
    assert (event.global_step, event.resumed, event.checkpoint) == (27, True, 20)
    assert run.weight(50) == 25.0
    assert run.steps() == [0, 20, 30, 40, 50]
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
    losses = {each.global_step: each.loss for each in read_index(run.uri)}
    assert losses[10] == 40.0
    assert run.rows("validation_loss") == [40.0, 1.0, 1.0, 1.0]


def test_a_validation_of_an_earlier_step_is_none_of_what_is_left(run, left):
    given = {"checkpoint_every": 20, "validate": lambda _strategy: {"loss": 1.0}}
    one_attempt(run, until=15, **given)
    assert (run.steps(), run.rows("validation_loss")) == ([0], [1.0])
    left(15)
    with pytest.raises(RunInterruptedError):
        run.train(steps=40, keep=100, should_stop=lambda: True, **given)
    assert {each.global_step: each.loss for each in read_index(run.uri)} == {0: None, 15: None}
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
    monkeypatch.setattr(optimizers, "_exchange", lambda _: reported.append("exchanged"))
    run.train(Reporting(), steps=10, ema=0.5, validate=lambda _: {"loss": 1.0})
    assert reported == [True, False, "exchanged", "exchanged", True]


def test_a_run_that_stopped_early_stays_stopped(run):
    given = {"patience": 1, "validate": lambda _strategy: {"loss": 1.0}}
    assert run.train(steps=90, **given) == 20
    assert run.train(steps=90, **given) == 20
    assert run.rows() == [10, 20]
    assert run.steps()[-1] == 20


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


@pytest.mark.parametrize("loss", [-1.0, 0.0, MOST * 0.99])
def test_a_loss_that_is_merely_bad_or_odd(run, loss):
    assert run.train(Counting(loss), steps=20) == 20


def test_a_loss_that_is_none_at_once(run):
    message = refused(run, Counting(lambda _: math.nan))
    assert "; look for a logarithm or a root of zero, or a division by zero; otherwise" in message
    assert message.endswith(f"(the last finite checkpoint is {run.uri}/step-00000000)")
    assert run.steps() == [0]
    assert run.rows() == []


def test_a_weight_that_is_not_finite_behind_a_loss_that_is(run):
    message = refused(run, Counting(from_step(25, poison(math.inf))))
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


def test_a_validation_that_is_none_behind_a_loss_that_is(run):
    def validate(strategy):
        return {"loss": math.nan if strategy.global_step() >= 30 else 1.0, "accuracy": 0.5}

    message = refused(run, validate=validate)
    assert message.startswith("training diverged: the validation loss is nan at global step")
    assert run.steps() == [0, 10, 20]
    assert run.rows("validation_loss") == [1.0, 1.0]
