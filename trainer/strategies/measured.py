"""A copy of a model in this process, to be measured at the variables of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

# The model, the number of a part and the number of all parts, to sums over the part's examples.
Totals = Callable[[keras.Model, tf.Tensor, int], list[tf.Tensor]]


class MeasuredCopy:
    """Stands on one device, whatever strategy trains the original."""

    def __init__(self, build_model: Callable[[], keras.Model], totals: Totals) -> None:
        """Build the copy; what is built before a cluster is connected is lost with its devices."""
        self._model = build_model()
        model = self._model

        @tf.function
        def graph(part: tf.Tensor, of: int) -> list[tf.Tensor]:
            return totals(model, part, of)

        self._graph = graph

    def totals(self, variables: Mapping[str, tf.Variable], part: int, of: int) -> list[float]:
        """Return the sums over one of `of` parts; `variables` are those of a checkpoint."""
        for variable in self._model.variables:
            variable.assign(variables[f"model/{variable.path}"])
        return [float(value) for value in self._graph(tf.constant(part), of)]
