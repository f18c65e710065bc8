"""Answers `request.json` of an exported model: `python smoke_request.py FOLDER < PATH`.

Like a client, this program imports nothing from Flotilla. Standard input contains the path of the
SavedModel in the folder, and is closed when all files have been written. The last line on standard
output is a JSON object: `answers` by column, and `milliseconds`.
"""

from __future__ import annotations

import base64
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

_REPEATS = 20


def main() -> None:
    """Wait until all files are written, load the model, call it, and print the predictions."""
    folder = Path(sys.argv[1])
    saved_model = sys.stdin.read()
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    signature = tf.saved_model.load(folder / saved_model).signatures[request["signature_name"]]
    _, takes = signature.structured_input_signature

    def ask(instances: list[dict[str, Any]]) -> Any:
        given = {
            name: tf.constant([_value(each[name]) for each in instances], spec.dtype)
            for name, spec in takes.items()
        }
        return signature(**given)

    answers = {name: each.numpy().tolist() for name, each in ask(request["instances"]).items()}
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        ask(request["instances"][:1])
        seconds.append(time.perf_counter() - began)
    answer = {
        "answers": answers,
        "milliseconds": round(1000 * statistics.median(seconds), 3),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(each) for each in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
