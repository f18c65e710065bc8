"""A branch that few steps take, traced once for all shards that differ by their resources alone.

`tf.cond` would trace it for each of them, and put all of its operations into the graph of a step: a
chief would trace a table for longer than all the rest of a model, and each worker would prepare
operations that hardly any step needs. Here the branch is a function of the resources of a shard,
and one operation of the graph, which runs it where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """Both branches, and which resources of a shard they take, in their order."""

    taken: Any
    passed: Any
    order: tuple[int, ...]


class SharedBranch:
    """The branch of some shards that differ by their resources and by what they give it."""

    def __init__(self) -> None:
        """Trace nothing before it is needed."""
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
        """Return `work(*given)` where it is needed, else the first of `given`.

        Without a graph, as for a debugger, the work is that of Python.

        Args:
            is_needed: a scalar, bool.
            work: from `given` to a tensor of the type and shape of the first of them. It reads and
                changes `resources`, and nothing else.
            given: tensors.
            resources: handles, in an order that is the same for all shards. Another number of them
                is another branch.
            device: where all of them are.
            kind: all else that the work depends on; of another kind it is another branch.
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
            # A hash table is on a CPU, and a variable may be on a GPU: no function of one device.
            found.op._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=True))
        found.set_shape(given[0].shape)
        return found


def _trace(
    work: Callable[..., tf.Tensor],
    signature: Sequence[tf.TensorSpec],
    resources: Sequence[tf.Tensor],
) -> _Traced:
    numbers = {id(each): number for number, each in enumerate(resources)}
    # It runs where the resources are that it is given.
    with tf.device(None):
        taken = tf.function(work, autograph=False).get_concrete_function(*signature)
        order = tuple(numbers[id(each)] for each in taken.captured_inputs)
        handles = [tf.TensorSpec([], tf.resource)] * len(order)
        passed = tf.function(
            lambda *every: tf.identity(every[0]), autograph=False
        ).get_concrete_function(*signature, *handles)
    return _Traced(taken=taken, passed=passed, order=order)
