"""The outer loop in several tasks side by side: one journal, one course, one end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.trainer.counting import Counting, Run
from trainer import events
from trainer.checkpoints.history import read_history
from trainer.errors import ClusterLostError, RunInterruptedError, UserError

SECONDS = 60


class Table:
    """Where tasks put their values down, and take the largest of each away."""

    def __init__(self, seats):
        self._barrier = threading.Barrier(seats)
        self._values = {}

    def agree(self, seat, values):
        self._values[seat] = values
        self._barrier.wait(SECONDS)
        largest = tuple(max(each) for each in zip(*self._values.values(), strict=True))
        self._barrier.wait(SECONDS)
        return largest

    def stand_up(self):
        self._barrier.abort()


class Beside(Counting):
    """One of the tasks that count side by side; task 0 publishes."""

    def __init__(self, table, seat, loss=1.0):
        super().__init__(loss)
        self.table, self.seat, self.left = table, seat, 0

    @property
    def publishes(self):
        return self.seat == 0

    def agreed(self, *values):
        return self.table.agree(self.seat, values)

    def leave(self):
        self.left += 1


class Told(Counting):
    """A task that hears of the others what a test says, from a given step on."""

    def __init__(self, *others, publishes=True, at=0):
        super().__init__()
        self.others, self._publishes, self.at, self.left = others, publishes, at, []

    @property
    def publishes(self):
        return self._publishes

    def agreed(self, *values):
        others = self.others if len(values) == 4 and self.global_step() >= self.at else values
        return tuple(max(pair) for pair in zip(values, others, strict=True))

    def leave(self):
        self.left.append(self.global_step())


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)


def side_by_side(run, tasks, *, stopping=None, **training):
    """Run the loop of each task in a thread; return how each of them ended."""

    def one(task):
        asked = (lambda: True) if task.seat == stopping else (lambda: False)
        try:
            return run.train(task, stopping=asked, **training)
        except (UserError, ClusterLostError) as error:
            return error
        except BaseException:
            # The others would wait for this one.
            task.table.stand_up()
            raise

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(one, tasks))


def three(loss=1.0):
    table = Table(3)
    return [Beside(table, seat, loss) for seat in range(3)]


def test_all_come_to_the_end_and_one_of_them_keeps_the_journal(run):
    tasks = three()
    assert side_by_side(run, tasks, steps=25, keep=100) == [25, 25, 25]
    assert run.steps() == [0, 10, 20, 25]
    assert run.rows() == [10, 20, 25]
    assert len(run.events("life")) == 1
    assert [each["global_step"] for each in run.events("checkpoint")] == [0, 10, 20, 25]
    assert [task.left for task in tasks] == [1, 1, 1]


def test_all_go_on_from_the_same_checkpoint(run):
    side_by_side(run, three(), steps=15, keep=100)
    assert side_by_side(run, three(), steps=30, keep=100) == [30, 30, 30]
    assert [each["global_step"] for each in run.events("life")] == [0, 15]
    assert run.weight(30) == 15.0


@pytest.mark.parametrize("asked", [0, 2])
def test_an_end_that_is_asked_of_one_is_the_end_of_all(run, asked):
    tasks = three()
    ended = side_by_side(run, tasks, stopping=asked, steps=100)
    assert {type(each) for each in ended} == {RunInterruptedError}
    said = {str(each) for each in ended}
    assert len(said) == 1
    assert said.pop().endswith(f"checkpoint {run.uri}/step-00000000")
    assert [task.left for task in tasks] == [1, 1, 1]


def test_a_bystander_leaves_nothing_behind(run):
    task = Told(0, 0, 0, 0, publishes=False)
    assert run.train(task, steps=25) == 25
    assert run.steps() == []
    assert read_history(run.uri) == []
    assert not (run.folder / "events.jsonl").exists()
    assert task.left == [25]


def test_a_bystander_names_the_checkpoint_that_another_one_publishes(run):
    task = Told(0, 0, 0, 0, publishes=False)
    with pytest.raises(RunInterruptedError, match=r"at global step 20; .*/step-00000020$"):
        run.train(task, steps=100, stopping=lambda: task.global_step() >= 20)


def test_an_early_end_of_another_one_is_ones_own(run):
    task = Told(0, 1, 0, 0, at=10)
    assert run.train(task, steps=100, keep=9) == 10
    assert run.steps() == [0, 10]
    assert task.left == [10]


def test_a_checkpoint_that_another_one_is_late_with_is_saved(run):
    run.train(Told(0, 0, 1, 0, at=10), steps=30, keep=9, checkpoint_every=1000)
    assert run.steps() == [0, 10, 20, 30]


def test_the_longest_stretch_is_everyones(run):
    run.train(Told(0, 0, 0, 7), steps=21, validate_every=0, checkpoint_every=3)
    assert run.rows()[:2] == [7, 14]


def test_who_found_another_checkpoint_begins_again(run):
    class Elsewhere(Counting):
        def agreed(self, *values):
            return tuple(max(value, 20) for value in values)

    with pytest.raises(ClusterLostError, match="found different checkpoints"):
        run.train(Elsewhere(), steps=30)
    assert run.steps() == []


def test_who_diverges_does_not_part_in_peace(run):
    task = Told(0, 0, 0, 0)
    task._loss = float("nan")
    with pytest.raises(UserError, match="the loss is nan"):
        run.train(task, steps=30)
    assert task.left == []
    assert run.steps() == [0]
