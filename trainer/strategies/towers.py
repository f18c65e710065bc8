"""Towers: a worker with several devices computes one gradient on all of them.

Each device takes its own batch. All devices use the same weights, which are pulled once, and the
mean of their gradients is pushed once. Moving averages are averaged over the towers, and each tower
has its own seed. Other state variables may define a `join` method that merges their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flotilla.trainer.embeddings.embedding_table import SEED
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.strategies.strategy import Batch

Tensors = list[tf.Tensor]
Gradient = Any
# A function from weights, state and batch to the loss, one gradient per weight, and the new state.
Compute = Callable[[Tensors, Tensors, Batch], tuple[tf.Tensor, list[Gradient], Tensors]]


@dataclass(frozen=True, kw_only=True)
class Towers:
    """The devices of every worker, such as `/device:GPU:0`. Often, there is only one."""

    devices: tuple[str, ...] = ("/device:CPU:0",)

    def __len__(self) -> int:
        """Return the number of batches in one step."""
        return len(self.devices)

    def take(self, iterator: Any) -> Any:
        """Return the input of one step: a batch, or a list with one batch for each device."""
        return next(iterator) if len(self) == 1 else [next(iterator) for _ in self.devices]

    def gradient(self, gradient: Callable[[Batch], Any]) -> Callable[[Any], Any]:
        """Return a function from the result of `take` to the mean loss and the mean gradient."""
        if len(self) == 1:
            return gradient

        def compute_all(batches: Sequence[Batch]) -> tuple[tf.Tensor, list[Gradient]]:
            found = []
            for device, batch in zip(self.devices, batches, strict=True):
                with tf.device(device):
                    found.append(gradient(batch))
            return _means(found)

        return compute_all

    def pure(self, compute: Compute, state_of: Sequence[Any]) -> Compute:
        """Return a `compute` that runs on all devices. `state_of` lists the state variables."""
        if len(self) == 1:
            return compute
        seeds = [variable.path.endswith(SEED) for variable in state_of]

        def compute_all(weights: Tensors, state: Tensors, batches: Any) -> Any:
            ended = []
            for number, (device, batch) in enumerate(zip(self.devices, batches, strict=True)):
                own = list(state)
                with tf.device(device):
                    if number:
                        own = [
                            each + tf.cast([number, 0], each.dtype) if seed else each
                            for each, seed in zip(state, seeds, strict=True)
                        ]
                    ended.append(compute(weights, own, batch))
            after = [
                each[0] if each[0] is old else _join(variable, each)
                for variable, old, *each in zip(
                    state_of, state, *(moved for *_, moved in ended), strict=True
                )
            ]
            return *_means([(value, found) for value, found, _ in ended]), after

        return compute_all


ONE = Towers()


def list_towers(devices: Sequence[str]) -> Towers:
    """Return the towers of all workers from their device names. Raises `UserError`."""
    specs = [tf.DeviceSpec.from_string(name) for name in devices]
    of_workers = [each for each in specs if each.job == "worker"]
    kind = "GPU" if any(each.device_type == "GPU" for each in of_workers) else "CPU"
    counts = dict.fromkeys(sorted(each.task for each in of_workers), 0)
    for each in of_workers:
        counts[each.task] += each.device_type == kind
    if len(set(counts.values())) > 1:
        found = ", ".join(f"worker-{worker} has {count}" for worker, count in counts.items())
        raise UserError(
            f"every worker needs the same number of {kind}s, but {found}: set CUDA_VISIBLE_DEVICES "
            "if you start tasks yourself"
        )
    return Towers(devices=tuple(f"/device:{kind}:{i}" for i in range(max(counts.values()))))


def mean(gradients: Sequence[Gradient]) -> Gradient:
    """Return the mean of a variable's gradients. Sparse gradients stay sparse."""
    if isinstance(gradients[0], tf.IndexedSlices):
        values = tf.concat([each.values for each in gradients], 0) / len(gradients)
        indices = tf.concat([each.indices for each in gradients], 0)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n(list(gradients)) / len(gradients)


def _join(variable: Any, values: Sequence[tf.Tensor]) -> tf.Tensor:
    first = values[0]
    join = getattr(variable, "join", mean if first.dtype.is_floating else None)
    return join(values) if join else first


def _means(found: Sequence[tuple[tf.Tensor, list[Gradient]]]) -> tuple[tf.Tensor, list[Gradient]]:
    gradients = zip(*(gradient for _, gradient in found), strict=True)
    return mean([loss for loss, _ in found]), [mean(each) for each in gradients]
