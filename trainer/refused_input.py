"""What a model says of an example that it does not take, told in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from trainer.errors import UserError

_ASSERTION = re.compile(r"assertion failed: \[([^]]*)\]((?: \[[^]]*\])*)")


@contextmanager
def refused_input() -> Iterator[None]:
    """Make a `UserError` of an assertion that failed in a model's graph, wherever that has run.

    TensorFlow tells it many times over, with the stack of every task that it passed on its way.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _ASSERTION.search(str(error))
        if not found:
            raise
        words = " ".join([found[1], *re.findall(r"\[([^]]*)\]", found[2])])
        raise UserError(f"the model refused its input: {words}") from error
