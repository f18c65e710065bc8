"""Sparse updates of embedding tables, which read and update only the rows of a batch.

The updates are lazy, like TensorFlow's sparse kernels and `LazyAdam` of TensorFlow Addons: a row
and its slots do not change in a step that has no gradient for the row. Dense updates
(`training.optimizer.dense_updates`) also change rows with a zero gradient. The differences:

- Adam: in steps that do not touch a row, its moments do not decay, and the row does not move. The
  bias is corrected by the global step, as in a dense update, and not by the number of touches.
- SGD with momentum: the velocity does not change between two touches.
- SGD without momentum, and Adagrad: lazy and dense updates are equal.
- Ftrl: a row that was never touched keeps its initial values (a dense update sets them to zero), a
  new learning rate takes effect at the next touch, and `l2_shrinkage` applies only at touches.
- Weight decay applies to the touched rows, once per touch.

The kernels for momentum and Ftrl lock the variable and its slots, so each update is atomic. With
other optimizers, if two workers touch a row at the same time, part of one gradient may be lost in
that row or its slots ("Hogwild!", Niu et al. 2011). Other rows are not affected.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings.batch_rows import is_table

log = logging.getLogger(__name__)

# Minimum number of values in a table for a warning, and the time that a million values cost in each
# step, in milliseconds: a million rows of 16 values took 36 to 70 ms with Adam.
LARGE = 1_000_000
MILLISECONDS = 3
# With momentum and lazy updates, the AUC after 600 steps on the data of configs/clicks.yaml was
# 0.55, compared to 0.76 with dense updates.
SLOWER = (
    "momentum updates a table row only when a batch looks it up, so rare ids learn slowly; set "
    "training.optimizer.dense_updates, or use adam or adagrad"
)


def use(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    training: TrainingConfig,
    *,
    pulled: bool = False,
    summed: bool = False,
) -> None:
    """Read and update single rows if possible. Log why a large table is updated as a whole.

    `pulled` indicates whether workers pull and push whole tables. `summed` indicates whether the
    optimizer itself sums the gradients of the replicas after clipping.
    """
    read_rows(model)
    if not training.optimizer.dense_updates and not summed:
        update_touched_rows(optimizer)
        if isinstance(_lazy_form(optimizer), _Momentum) and not pulled and _tables(model):
            log.warning("%s", SLOWER)
    if line := whole_tables(model, optimizer, training, pulled=pulled):
        log.warning("%s", line)


def whole_tables(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    training: TrainingConfig,
    *,
    pulled: bool,
) -> str:
    """Return a warning that names the large tables updated as a whole, and the reason, or ""."""
    tables = [each for each in _tables(model) if math.prod(each.shape) >= LARGE]
    kept = any(each.regularizer or each.constraint for each in tables)
    name = type(optimizer).__name__
    has_none = _lazy_form(optimizer) is None and not training.optimizer.dense_updates
    reasons = {
        f"{name} cannot update single rows, unlike Adam, AdamW, Adagrad, Ftrl and SGD": has_none,
        "training.ema averages all rows": training.ema > 0,
        "a table has a regularizer or a constraint": kept,
        "training.pull_every or training.jit_compile needs whole tables": pulled,
    }
    why = ", ".join(reason for reason, holds in reasons.items() if holds)
    if not tables or not why:
        return ""
    numbers = sum(math.prod(each.shape) for each in tables)
    return (
        f"each step updates whole tables ({tables[0].path}; {numbers:,} values in total, about "
        f"{MILLISECONDS * numbers / 1e6:,.0f} ms per step): {why}"
    )


def _tables(model: keras.Model) -> list[keras.Variable]:
    """Return the trainable variables of all layers that look up rows."""
    return [
        variable
        for layer in model._flatten_layers()
        if is_table(layer)
        for variable in layer._trainable_variables
    ]


def read_rows(model: keras.Model) -> None:
    """Make Keras's embeddings read single rows: a full read after an update copies the table."""
    for layer in model._flatten_layers():
        its_own = getattr(type(layer), "call", None) is not keras.layers.Embedding.call
        if its_own or not layer.built or layer.lora_enabled or layer.quantization_mode:
            continue
        layer.call = _make_call(layer)


def _make_call(layer: Any) -> Callable[[Any], Any]:
    whole, tensor_of = layer.call, keras.ops.convert_to_tensor

    def call(inputs: Any) -> Any:
        ids = inputs if isinstance(inputs, keras.KerasTensor) else tensor_of(inputs)
        if not isinstance(ids, tf.Tensor):
            return whole(inputs)
        if ids.dtype not in {tf.int32, tf.int64}:
            ids = tf.cast(ids, tf.int32)
        # As in Keras, a negative id counts from the end.
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)
        # A cast to the compute dtype would read the whole table.
        with AutocastScope(None):
            found = tf.gather(layer._embeddings.value, ids)
        return tf.cast(found, layer.compute_dtype)

    return call


def update_touched_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Make a built optimizer lazy. An optimizer without a lazy form is unchanged.

    The gradients must not have duplicate rows (see `flotilla.trainer.optimizers.optimizers`). For
    rows that every step touches, the results equal those of Keras, up to rounding.
    """
    rows = _lazy_form(optimizer)
    if rows is None:
        return
    by_variable, decay = optimizer._backend_update_step, optimizer._apply_weight_decay

    def update(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        whole, touched = list[Any](), list[Any]()
        for gradient, variable in zip(gradients, variables, strict=True):
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            (touched if is_sparse else whole).append((gradient, variable))
        if whole:
            decay([variable for _, variable in whole])
            by_variable(*map(list, zip(*whole, strict=True)), learning_rate)
        if touched:
            rows.update([(gradient, _tensor(v)) for gradient, v in touched], learning_rate)

    optimizer._backend_update_step = update
    # Keras calls this method before the update and without the gradients, so `update` decays the
    # weights instead.
    optimizer._apply_weight_decay = lambda _variables: None


def _tensor(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


class _Rows(ABC):
    """An update of the rows of a variable and of its slots, on their device."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def rate(self, learning_rate: tf.Tensor) -> tf.Tensor:
        return learning_rate

    @abstractmethod
    def move(self, variable: Any, ids: tf.Tensor, values: tf.Tensor, rate: tf.Tensor) -> None:
        """Update the rows `ids` by the gradient `values`. The ids have no duplicates."""

    def update(self, touched: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        """Update the rows of all tables, with or without a replica context."""
        weight_decay = self.optimizer.weight_decay or 0.0

        def rates_of(dtype: tf.DType) -> tf.Tensor:
            base = tf.cast(learning_rate, dtype)
            return tf.stack([base * tf.cast(weight_decay, dtype), self.rate(base)])

        with tf.device(self.optimizer.iterations.value.device):
            rates = {dtype: rates_of(dtype) for dtype in {_precision(v) for _, v in touched}}

        def one(variable: Any, gradient: Any, rates: tf.Tensor) -> None:
            with tf.device(variable.device):
                decay, rate = tf.unstack(tf.cast(rates, variable.dtype))
                values = tf.cast(gradient.values, variable.dtype)
                if weight_decay and self.optimizer._use_weight_decay(variable):
                    tf.raw_ops.ResourceScatterMul(
                        resource=variable.handle, indices=gradient.indices, updates=1 - decay
                    )
                self.move(variable, gradient.indices, values, rate)

        def every(distribution: Any, pairs: Any, rates: Any) -> None:
            for gradient, variable in pairs:
                args = (gradient, rates[_precision(variable)])
                distribution.extended.update(variable, one, args=args, group=False)

        tf.__internal__.distribute.interim.maybe_merge_call(
            every, self.optimizer._distribution_strategy, list(touched), rates
        )

    def slot(self, name: str, variable: tf.Variable) -> tf.Tensor:
        index = self.optimizer._get_variable_index(variable)
        return getattr(self.optimizer, name)[index].value.handle


class _Adam(_Rows):
    """Adam (Kingma and Ba 2015, end of section 2), as in Keras. TensorFlow has no sparse kernel."""

    def rate(self, learning_rate: tf.Tensor) -> tf.Tensor:
        dtype = learning_rate.dtype
        step = tf.cast(self.optimizer.iterations.value + 1, dtype)
        power_1, power_2 = (
            tf.pow(tf.cast(beta, dtype), step)
            for beta in (self.optimizer.beta_1, self.optimizer.beta_2)
        )
        return learning_rate * tf.sqrt(1 - power_2) / (1 - power_1)

    def move(self, variable: Any, ids: tf.Tensor, values: tf.Tensor, rate: tf.Tensor) -> None:
        optimizer = self.optimizer
        first, second = (self.slot(name, variable) for name in ("_momentums", "_velocities"))
        m, v = _gather(first, ids, variable), _gather(second, ids, variable)
        m += (values - m) * (1 - optimizer.beta_1)
        v += (tf.square(values) - v) * (1 - optimizer.beta_2)
        _assign(first, ids, m)
        _assign(second, ids, v)
        if optimizer.amsgrad:
            third = self.slot("_velocity_hats", variable)
            v = tf.maximum(_gather(third, ids, variable), v)
            _assign(third, ids, v)
        _subtract(variable.handle, ids, m * rate / (tf.sqrt(v) + optimizer.epsilon))


class _Adagrad(_Rows):
    """Adagrad as in Keras, with epsilon under the root. TensorFlow's kernel adds it to the root."""

    def move(self, variable: Any, ids: tf.Tensor, values: tf.Tensor, rate: tf.Tensor) -> None:
        sums = self.slot("_accumulators", variable)
        # Add, so that concurrent updates by other workers are kept.
        tf.raw_ops.ResourceScatterAdd(resource=sums, indices=ids, updates=tf.square(values))
        root = tf.sqrt(_gather(sums, ids, variable) + self.optimizer.epsilon)
        _subtract(variable.handle, ids, values * rate / root)


class _Ftrl(_Rows):
    def move(self, variable: Any, ids: tf.Tensor, values: tf.Tensor, rate: tf.Tensor) -> None:
        optimizer, dtype = self.optimizer, variable.dtype
        l2 = optimizer.l2_regularization_strength + optimizer.beta / (2 * rate)
        tf.raw_ops.ResourceSparseApplyFtrlV2(
            var=variable.handle,
            accum=self.slot("_accumulators", variable),
            linear=self.slot("_linears", variable),
            grad=values,
            indices=ids,
            lr=rate,
            l1=tf.cast(optimizer.l1_regularization_strength, dtype),
            l2=tf.cast(l2, dtype),
            l2_shrinkage=tf.cast(optimizer.l2_shrinkage_regularization_strength, dtype),
            lr_power=tf.cast(optimizer.learning_rate_power, dtype),
            use_locking=True,
        )


class _Descent(_Rows):
    def move(self, variable: Any, ids: tf.Tensor, values: tf.Tensor, rate: tf.Tensor) -> None:
        _subtract(variable.handle, ids, values * rate)


class _Momentum(_Rows):
    def move(self, variable: Any, ids: tf.Tensor, values: tf.Tensor, rate: tf.Tensor) -> None:
        tf.raw_ops.ResourceSparseApplyKerasMomentum(
            var=variable.handle,
            accum=self.slot("momentums", variable),
            lr=rate,
            grad=values,
            indices=ids,
            momentum=tf.cast(self.optimizer.momentum, variable.dtype),
            use_nesterov=self.optimizer.nesterov,
            use_locking=True,
        )


def _gather(handle: tf.Tensor, ids: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=variable.dtype)


def _assign(handle: tf.Tensor, ids: tf.Tensor, values: tf.Tensor) -> None:
    tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=ids, updates=values)


def _subtract(handle: tf.Tensor, ids: tf.Tensor, values: tf.Tensor) -> None:
    tf.raw_ops.ResourceScatterSub(resource=handle, indices=ids, updates=values)


def _precision(variable: tf.Variable) -> tf.DType:
    """Return the dtype for scalars, at least float32, because powers of betas near 1 need it."""
    return tf.float64 if variable.dtype == tf.float64 else tf.float32


_LAZY: dict[type[keras.optimizers.Optimizer], type[_Rows]] = {
    keras.optimizers.Adam: _Adam,
    keras.optimizers.AdamW: _Adam,
    keras.optimizers.Adagrad: _Adagrad,
    keras.optimizers.Ftrl: _Ftrl,
}


def _lazy_form(optimizer: keras.optimizers.Optimizer) -> _Rows | None:
    # Match the exact type, because a subclass may have another formula.
    kind = type(optimizer)
    if kind is keras.optimizers.SGD:
        return (_Momentum if optimizer.momentum else _Descent)(optimizer)
    return _LAZY[kind](optimizer) if kind in _LAZY else None
