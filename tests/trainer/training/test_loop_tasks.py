"""Tests several tasks that run the outer loop at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.events import AttemptBegin, CheckpointPublished
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from tests.trainer.counting import Counting

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
