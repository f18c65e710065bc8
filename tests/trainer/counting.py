"""A single-process strategy that only counts updates, and a training run that uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.strategies.strategy import Problem, Report, Strategy
from flotilla.trainer.training.loop import Hooks, train

CHANCE_LOSS = 2.0
Kind = TypeVar("Kind", bound=events.Event)


class Counting(Strategy):
    """A strategy with one weight, which grows by 0.5 per update and so counts the updates."""

    def __init__(self, loss: Callable[[Counting], float] | float = 1.0, *, beyond: int = 0) -> None:
        """Report `loss` from each `run`; apply `beyond` more updates than requested."""
        super().__init__(Config(), Cluster(addresses={}), Task(role="chief", index=0))
        self._loss = loss
        self._beyond = beyond

    def build(self, _problem: Problem) -> None:
        self.weight = tf.Variable(0.0)
        self.counter = tf.Variable(0, dtype=tf.int64)

    def run(self, steps: int) -> Report:
        applied = steps + self._beyond
        self.counter.assign_add(applied)
        self.weight.assign_add(0.5 * applied)
        return Report(loss=self._loss(self) if callable(self._loss) else self._loss)

    def global_step(self) -> int:
        return int(self.counter.numpy())

    def variables(self) -> Mapping[str, tf.Variable]:
        return {"model/weight": self.weight, "global_step": self.counter}

    def learning_rate(self) -> float:
        return 0.5


@dataclass(frozen=True)
class Run:
    """A run's folder, with methods that train in it and read its results."""

    folder: Path

    @property
    def uri(self) -> str:
        return storage.uri_of(self.folder / "checkpoints")

    def steps(self) -> list[int]:
        for uri, _ in list_checkpoints(self.uri):
            storage.verify(uri)
        return [step for _, step in list_checkpoints(self.uri)]

    def fields(self, step: int) -> Mapping[str, Any]:
        return storage.read_manifest(storage.join(self.uri, f"step-{step:08d}")).fields

    def weight(self, step: int) -> float:
        prefix = self.folder / "checkpoints" / f"step-{step:08d}" / "variables"
        reader = tf.train.load_checkpoint(str(prefix))
        return float(reader.get_tensor("variables/model.Sweight/.ATTRIBUTES/VARIABLE_VALUE"))

    def rows(self, name: str = "global_step") -> list[Any]:
        return [row[name] for row in read_history(self.uri) if name in row]

    def events(self, kind: type[Kind]) -> list[Kind]:
        found = events.read(self.folder / "events.jsonl")
        return [each for each in found if isinstance(each, kind)]

    def all_events(self) -> list[dict[str, Any]]:
        return list(events.read(self.folder / "events.jsonl"))

    def damage(self, step: int) -> None:
        path = self.folder / "checkpoints" / f"step-{step:08d}" / "variables.data-00000-of-00001"
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)

    def train(self, strategy: Strategy | None = None, **named: Any) -> int:
        """Start an attempt; `named` contains hooks and keys of the `training` section."""
        own = {each.name: named.pop(each.name) for each in fields(Hooks) if each.name in named}
        config = config_of(**named)
        checkpoints = Checkpoints(
            self.uri, keep=config.training.keep, scratch=self.folder / "scratch"
        )
        hooks = Hooks(**{"make_problem": nothing, **own})
        return train(config, strategy or Counting(), checkpoints, hooks)


def config_of(**training: Any) -> Config:
    """Return a configuration that saves a checkpoint and validates every ten steps."""
    return parse_config({"training": {"checkpoint_every": 10, "validate_every": 10, **training}})


def nothing(_start: int) -> Problem:
    """Return a problem without data or a model, which a counting strategy does not need."""

    def unused() -> Any:
        raise AssertionError("counting needs no model and no data")

    return Problem(
        build_model=unused,
        build_optimizer=unused,
        loss=unused,
        chance_loss=CHANCE_LOSS,
        batches=unused,
    )


def stop_after(looks):
    """Return a function that requests a stop after `looks` calls."""
    asked = iter([False] * looks)
    return lambda: next(asked, True)
