"""The pipeline, and the command line around it."""

import os
import sys

# `python -m flotilla.pipelines` puts the working folder first, where a `json.py` is not Python's own. Each
# package says this for itself: another of the name may be in that folder.
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and any(f"{each}.".startswith(f"{__name__}.") for each in sys.orig_argv)
    and os.path.dirname(os.path.dirname(__file__)) != sys.path[0]
):
    del sys.path[0]
