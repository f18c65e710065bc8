"""A request to the exported model in a fresh process that knows nothing but the written folder.

TensorFlow takes seconds to load: the process is started before there is anything to ask, and loads
it while the model is written.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import UserError
from trainer.forms import FORMS, answers_of, called
from trainer.parity import Subject
from trainer.signature import SERVING, serving_name

REQUEST = "request.json"
EXAMPLES = 3
SECONDS = 300
_PROGRAM = Path(__file__).with_name("smoke_request.py")

Fresh = subprocess.Popen[str]


@contextmanager
def fresh_process(folder: Path) -> Iterator[Fresh]:
    """Start the process that is asked later about what is written below `folder` until then."""
    # Isolated: neither this folder nor PYTHONPATH is looked at, so that no code of ours is found.
    command = [sys.executable, "-I", str(_PROGRAM), str(folder)]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    # It needs no Keras, which TensorFlow imports with itself unless it is told of another one.
    return {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_USE_LEGACY_KERAS": "1"}


def answered(subject: Subject, folder: Path, saved_model: str, process: Fresh) -> dict[str, Any]:
    """Write `request.json` into `folder`, let a fresh process answer it, and hold the answers.

    Returns:
        `max_difference` of the probabilities, and `milliseconds` of one example (the median).

    Raises:
        UserError: the process cannot load the model, or answers otherwise.
    """
    inputs, _ = subject.first()
    few = {name: np.asarray(values)[:EXAMPLES] for name, values in inputs.items()}
    rows = zip(*(each.tolist() for each in few.values()), strict=True)
    names = [serving_name(name) for name in few]
    instances = [dict(zip(names, map(_plain, row), strict=True)) for row in rows]
    request = {"signature_name": SERVING, "instances": instances}
    (folder / REQUEST).write_text(json.dumps(request) + "\n", encoding="utf-8")
    answer = _asked(process, saved_model)
    expected = answers_of(called(subject.model, few))["probabilities"]
    difference = float(np.max(np.abs(np.array(answer["probabilities"]) - expected)))
    tolerance = FORMS["saved_model"].tolerance
    if not difference <= tolerance:
        raise UserError(
            f"nothing is exported: a fresh process answers {EXAMPLES} examples by up to "
            f"{difference:g} otherwise than the original ({tolerance:g} is allowed)"
        )
    return {"max_difference": difference, "milliseconds": answer["milliseconds"]}


def _plain(value: Any) -> Any:
    """Return a value as TensorFlow Serving's REST interface takes it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _asked(process: Fresh, saved_model: str) -> dict[str, Any]:
    try:
        out, said = process.communicate(saved_model, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"nothing is exported: a fresh process gave no answer in {SECONDS} s"
        ) from None
    lines = [line for line in said.splitlines() if line.strip()]
    if process.returncode:
        last = lines[-1].strip() if lines else f"exit code {process.returncode}"
        raise UserError(f"nothing is exported: a fresh process cannot serve the model: {last}")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer
