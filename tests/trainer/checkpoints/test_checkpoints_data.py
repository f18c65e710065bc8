"""Which data a checkpoint was trained on, and that no other is put in its place."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer import storage
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.errors import UserError


def test_no_attempt_resumes_with_other_data(tmp_path):
    uri = storage.uri_of(tmp_path / "checkpoints")

    def checkpoints(fingerprint):
        scratch = tmp_path / "scratch"
        return Checkpoints(uri, keep=3, scratch=scratch, fingerprint=fingerprint)

    variables = {"global_step": tf.Variable(10, dtype=tf.int64)}
    checkpoints("aa").save(variables, io_device=None, fields={})
    assert checkpoints("aa").newest().global_step == 10
    with pytest.raises(UserError, match="step-00000010 was trained on other data") as caught:
        checkpoints("bb").newest()
    assert len(str(caught.value).splitlines()) == 1
