"""Tests that Flotilla uses TensorFlow even if a different Keras backend is configured."""

import json
import os
import subprocess
import sys

import pytest

CODE = "import trainer, keras; print(keras.config.backend())"


@pytest.mark.slow
def test_a_backend_of_the_shell_or_of_the_home_folder_is_not_ours(tmp_path):
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "torch"}), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "KERAS_BACKEND": "jax", "KERAS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.stdout == "tensorflow\n", ended.stderr
