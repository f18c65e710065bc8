"""The outer loop, around a strategy that only counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer import checkpoint_listing, history, storage
from trainer.checkpoints import Checkpoints
from trainer.cluster import Cluster, Task
from trainer.config_file import parse
from trainer.errors import ClusterLostError, RunInterruptedError, UserError
from trainer.strategies.interface import Problem, Report, Strategy
from trainer.train import Surroundings, train


class Counting(Strategy):
    """Counts, on one variable; `others` answers for the tasks beside it."""

    def __init__(
        self,
        losses: Callable[[int], float] = lambda _: 1.0,
        others: Callable[..., tuple[int, ...]] = lambda *values: values,
        publishes: bool = True,
    ) -> None:
        super().__init__(parse({}), Cluster(addresses={}), Task(role="chief", index=0))
        self._losses = losses
        self._others = others
        self._publishes = publishes
        self._step = tf.Variable(0, dtype=tf.int64)
        self.left_at: list[int] = []

    @property
    def publishes(self) -> bool:
        return self._publishes

    def agreed(self, *values: int) -> tuple[int, ...]:
        return tuple(map(max, values, self._others(*values)))

    def build(self, problem: Problem) -> None:
        """Nothing is to be made."""

    def run(self, steps: int) -> Report:
        # The loop's own speed is that of this machine, which must not decide where it looks.
        self._step.assign_add(steps)
        return Report(loss=self._losses(self.global_step()))

    def global_step(self) -> int:
        return int(self._step.numpy())

    def variables(self) -> Mapping[str, tf.Variable]:
        return {"global_step": self._step}

    def learning_rate(self) -> float:
        return 0.1

    def leave(self) -> None:
        self.left_at.append(self.global_step())


@dataclass
class Run:
    """One run in a folder, in as many lives as are asked for."""

    folder: Path
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return storage.uri_of(self.folder / "checkpoints")

    def train(
        self,
        strategy: Strategy,
        *,
        stopping: Callable[[], bool] = lambda: False,
        validate: Callable[[Strategy], dict[str, float]] | None = None,
    ) -> int:
        settings = {"steps": 100, "checkpoint_every": 50, "validate_every": 0, **self.training}
        around = Surroundings(problem=_problem, validate=validate, stopping=stopping)
        kept = Checkpoints(self.uri, keep=9, scratch=self.folder / "scratch")
        return train(parse({"training": settings}), strategy, kept, around)

    def checkpoints(self) -> list[int]:
        return [step for _, step in checkpoint_listing.listed(self.uri)]

    def rows(self) -> list[dict[str, Any]]:
        return history.read(self.uri)


def _problem(_start: int) -> Problem:
    return Problem(
        build_model=keras.Model,
        build_optimizer=keras.optimizers.SGD,
        loss=lambda _labels, logits: logits,
        chance_loss=1.0,
        batches=lambda: tf.data.Dataset.range(1),
    )


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


def test_trains_to_the_end_with_checkpoints_at_the_boundaries(run):
    strategy = Counting()
    assert run.train(strategy) == strategy.global_step() == 100
    assert run.checkpoints() == [0, 50, 100]
    assert strategy.left_at == [100]
    assert run.rows()[-1]["global_step"] == 100


def test_a_second_life_goes_on_from_the_newest_checkpoint(run):
    run.train(Counting())
    run.training = {"steps": 130}
    assert run.train(Counting()) == 130
    assert run.checkpoints() == [0, 50, 100, 130]


def test_a_checkpoint_is_due_by_the_clock_at_the_next_look(run):
    looks = {"validate_every": 40}
    run.training = {"checkpoint_every": 1000, "checkpoint_seconds": 1e-9, **looks}
    run.train(Counting())
    assert run.checkpoints() == [0, *(row["global_step"] for row in run.rows())]
    assert {0, 40, 80, 100} <= set(run.checkpoints())


def test_an_interrupt_publishes_a_last_checkpoint(run):
    strategy = Counting()
    with pytest.raises(RunInterruptedError) as caught:
        run.train(strategy, stopping=lambda: strategy.global_step() > 0)
    (_, newest) = run.checkpoints()
    assert str(caught.value) == (
        f"interrupted at global step {newest}; checkpoint {run.uri}/step-{newest:08d}"
    )
    assert strategy.left_at == [newest] == [run.rows()[-1]["global_step"]]


def test_an_end_that_another_task_was_asked_for_is_an_end_for_all(run):
    asked = Counting(others=lambda stop, *rest: (1, *rest) if rest[1:] else (stop, *rest))
    with pytest.raises(RunInterruptedError, match="interrupted at global step 0; checkpoint"):
        run.train(asked)


def test_a_task_beside_the_leader_leaves_nothing_and_says_the_same(run):
    beside = Counting(publishes=False)
    with pytest.raises(RunInterruptedError) as caught:
        run.train(beside, stopping=lambda: beside.global_step() >= 50)
    step = beside.global_step()
    assert str(caught.value) == (
        f"interrupted at global step {step}; checkpoint {run.uri}/step-{step:08d}"
    )
    assert beside.left_at == [step]
    assert not (run.folder / "checkpoints").exists()


@pytest.mark.parametrize("theirs", [-1, 50, 200])
def test_tasks_that_found_different_checkpoints_begin_again(run, theirs):
    run.train(Counting())
    other = Counting(others=lambda *values: (theirs, -theirs) if len(values) == 2 else values)
    with pytest.raises(ClusterLostError, match="the workers found different checkpoints"):
        run.train(other)
    assert run.checkpoints() == [0, 50, 100]


def test_training_stops_when_validation_gains_nothing_any_more(run):
    run.training = {"validate_every": 10, "patience": 2, "checkpoint_every": 1000}
    losses = iter([0.9, 0.5, 0.6, 0.7])
    reached = run.train(Counting(), validate=lambda _: {"loss": next(losses)})
    assert reached == 40
    assert run.checkpoints() == [0, 40]


def test_a_loss_that_diverges_names_the_checkpoint_before(run):
    wild = Counting(losses=lambda step: 1.0 if step <= 50 else float("nan"))
    with pytest.raises(UserError, match=f"the loss is nan.*{run.uri}/step-00000050"):
        run.train(wild)
    assert run.checkpoints() == [0, 50]
    assert wild.left_at == []
