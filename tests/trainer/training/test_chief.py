"""Which errors of TensorFlow begin a new life, and which end training."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer.training.chief import is_lost

MANGLED = (
    "Unable to parse request\nAdditional GRPC error information from remote target "
    "/job:worker/task:0:\n:UNKNOWN:Error received from peer {grpc_status:13}"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tf.errors.UnavailableError(None, None, "ps-0 is gone"), True),
        (tf.errors.AbortedError(None, None, "begun anew"), True),
        (tf.errors.InternalError(None, None, MANGLED), True),
        (tf.errors.InternalError(None, None, "a kernel failed"), False),
        (tf.errors.InvalidArgumentError(None, None, "id 7 is outside of the table"), False),
        (tf.errors.ResourceExhaustedError(None, None, "out of memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_was_lost_is_told_from_what_is_wrong(error, expected):
    assert is_lost(error) is expected
