"""Flotilla: TensorFlow models trained on parameter servers, as a Kubeflow pipeline."""

import os
import sys

# `python -m flotilla.trainer` puts the working folder first, where a `json.py` is not Python's own.
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and any(f"{each}.".startswith(f"{__name__}.") for each in sys.orig_argv)
    and os.path.dirname(os.path.dirname(__file__)) != sys.path[0]
):
    del sys.path[0]
