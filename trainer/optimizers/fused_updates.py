"""Fused updates: one operation per variable, if TensorFlow has a kernel for the optimizer.

Keras implements Adam with thirty small operations per variable. A kernel needs one pass over the
values and locks the variable, so that each dense update is atomic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def fuse(optimizer: keras.optimizers.Optimizer) -> None:
    """Make a built optimizer use TensorFlow's kernel, if there is one.

    The kernels use the same formulas as Keras (Kingma and Ba 2015, "Adam", end of section 2;
    Sutskever et al. 2013 for momentum), with equal results except for rounding. Each variable must
    be on one device.
    """
    kernel = _kernel(optimizer)
    if kernel is None:
        return
    by_parts = optimizer._backend_update_step

    def update(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        home = optimizer.iterations.value.device
        with tf.device(home):
            rates = _Rates(home, kernel.rates(tf.cast(learning_rate, tf.float32)))
        rest = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices) or variable.value.dtype != tf.float32:
                # Leave embedding rows and variables of other types to Keras.
                rest.append((gradient, variable))
                continue
            with tf.device(variable.value.device):
                dense = tf.cast(gradient, tf.float32)
                kernel.apply(dense, variable, rates.send(variable.value.device))
        if rest:
            by_parts(*map(list, zip(*rest, strict=True)), learning_rate)

    optimizer._backend_update_step = update


class _Kernel(ABC):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def rates(self, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        """Return the scalars of an update, which are the same for all variables."""

    @abstractmethod
    def apply(self, gradient: tf.Tensor, variable: Any, rates: list[tf.Tensor]) -> None:
        """Update a variable and its slots."""


class _Adam(_Kernel):
    def rates(self, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        step = tf.cast(self.optimizer.iterations.value + 1, tf.float32)
        powers = [
            tf.pow(tf.cast(beta, tf.float32), step)
            for beta in (self.optimizer.beta_1, self.optimizer.beta_2)
        ]
        return [learning_rate, *powers]

    def apply(self, gradient: tf.Tensor, variable: Any, rates: list[tf.Tensor]) -> None:
        index = self.optimizer._get_variable_index(variable)
        rate, power_1, power_2 = rates
        tf.raw_ops.ResourceApplyAdam(
            var=variable.value.handle,
            m=self.optimizer._momentums[index].value.handle,
            v=self.optimizer._velocities[index].value.handle,
            beta1_power=power_1,
            beta2_power=power_2,
            lr=rate,
            beta1=float(self.optimizer.beta_1),
            beta2=float(self.optimizer.beta_2),
            epsilon=self.optimizer.epsilon,
            grad=gradient,
            use_locking=True,
        )


class _Descent(_Kernel):
    def rates(self, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        return [learning_rate]

    def apply(self, gradient: tf.Tensor, variable: Any, rates: list[tf.Tensor]) -> None:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.value.handle, alpha=rates[0], delta=gradient, use_locking=True
        )


class _Momentum(_Descent):
    def apply(self, gradient: tf.Tensor, variable: Any, rates: list[tf.Tensor]) -> None:
        index = self.optimizer._get_variable_index(variable)
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.value.handle,
            accum=self.optimizer.momentums[index].value.handle,
            lr=rates[0],
            grad=gradient,
            momentum=self.optimizer.momentum,
            use_nesterov=self.optimizer.nesterov,
            use_locking=True,
        )


def _kernel(optimizer: keras.optimizers.Optimizer) -> _Kernel | None:
    # Match the exact type, because a subclass may have another formula.
    kind = type(optimizer)
    if kind is keras.optimizers.SGD:
        return (_Momentum if optimizer.momentum else _Descent)(optimizer)
    adams = (keras.optimizers.Adam, keras.optimizers.AdamW)
    return _Adam(optimizer) if kind in adams and not optimizer.amsgrad else None


class _Rates:
    """The scalars of an update, which are sent to each device only once."""

    def __init__(self, home: str, values: list[tf.Tensor]) -> None:
        self._home = home
        self._by_device = {home: values}

    def send(self, device: str) -> list[tf.Tensor]:
        """Return the scalars on a device. The first call sends them there."""
        if device not in self._by_device:
            with tf.device(self._home):
                packed = tf.stack(self._by_device[self._home])
            with tf.device(device):
                self._by_device[device] = tf.unstack(tf.identity(packed))
        return self._by_device[device]
