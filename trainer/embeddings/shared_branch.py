"""A rare branch that is traced once for all shards, which differ only in their resources.

`tf.cond` would trace the branch for each shard and add all of its operations to the graph of a
step. Tracing a table would take the chief longer than tracing the rest of a model, and each worker
would prepare operations that are rarely needed. Here, the branch is a function of a shard's
resources, and a single operation of the graph calls it when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """Both branches, and the order in which they take their resources."""

    taken: Any
    passed: Any
    order: tuple[int, ...]


class SharedBranch:
    """A conditional that several shards share. Only the resources and arguments differ."""

    def __init__(self) -> None:
        """Create the branch, which is traced at its first use."""
        self._traced: dict[object, _Traced] = {}

    def run(  # noqa: PLR0913, PLR0917
        self,
        is_needed: tf.Tensor,
        work: Callable[..., tf.Tensor],
        given: Sequence[tf.Tensor],
        resources: Sequence[tf.Tensor],
        device: str,
        kind: Hashable = None,
    ) -> tf.Tensor:
        """Return `work(*given)` if `is_needed` is true. Otherwise, return the first of `given`.

        Outside of a graph, for example in a debugger, `work` runs as Python code.

        Args:
            is_needed: a bool scalar.
            work: a function from `given` to a tensor like the first of them. It may use only
                `resources`.
            given: tensors.
            resources: handles, in the same order for all shards. A different number of them needs
                another branch.
            device: the device of all resources.
            kind: everything else that `work` depends on. A different kind needs another branch.
        """
        if tf.executing_eagerly():
            return work(*given) if is_needed else given[0]
        signature = [tf.TensorSpec(each.shape, each.dtype) for each in given]
        key = (kind, tuple(signature), len(resources))
        if key not in self._traced:
            self._traced[key] = _trace(work, signature, resources)
        traced = self._traced[key]
        (found,) = tf.raw_ops.If(
            cond=is_needed,
            input=[*given, *(resources[number] for number in traced.order)],
            Tout=[given[0].dtype],
            then_branch=traced.taken,
            else_branch=traced.passed,
        )
        if tf.DeviceSpec.from_string(device).device_type != "CPU":
            # Inline the branches: a hash table is on the CPU, but a variable may be on a GPU, so no
            # device fits the whole operation.
            found.op._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=True))
        found.set_shape(given[0].shape)
        return found


def _trace(
    work: Callable[..., tf.Tensor],
    signature: Sequence[tf.TensorSpec],
    resources: Sequence[tf.Tensor],
) -> _Traced:
    numbers = {id(each): number for number, each in enumerate(resources)}
    with tf.device(None):
        taken = tf.function(work, autograph=False).get_concrete_function(*signature)
        order = tuple(numbers[id(each)] for each in taken.captured_inputs)
        handles = [tf.TensorSpec([], tf.resource)] * len(order)
        passed = tf.function(
            lambda *every: tf.identity(every[0]), autograph=False
        ).get_concrete_function(*signature, *handles)
    return _Traced(taken=taken, passed=passed, order=order)
