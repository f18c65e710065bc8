"""Generates Python programs that call a model.

The report, `flotilla models show` and the documentation show these programs. A program is derived
from the model's manifest and calls the model with the examples in `request.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_BEGIN = """import json

{imports}

folder = {folder}
manifest = json.load(open(f"{{folder}}/MANIFEST.json"))
rows = json.load(open(f"{{folder}}/request.json"))["instances"]
types = {{each["name"]: each["dtype"].replace("string", "object") for each in manifest["inputs"]}}
given = {{name: np.array([row[name] for row in rows], types[name]) for name in types}}
"""
_KERAS = """model = keras.models.load_model(f"{{folder}}/model.keras", compile=False)
outputs = model.predict({inputs}, verbose=0)
answers = {answers}
print(answers)"""
_SAVED_MODEL = """model = tf.saved_model.load(f"{folder}/{manifest['saved_model']}")
serve = model.signatures["serving_default"]
answers = serve(**{name: tf.constant(values) for name, values in given.items()})
print(answers)"""
_SEVERAL = '{each["feature"]: given[each["name"]] for each in manifest["inputs"]}'


def programs(folder: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return a program for each library that can load the model in `folder`, keyed by library.

    `fields` are the fields of the model's manifest. A model of an earlier version has no program
    for Keras.
    """
    found = {}
    links, inputs = fields.get("links"), list(fields.get("inputs") or [])
    if isinstance(links, Mapping) and "keras" in (fields.get("formats") or ()):
        modules = sorted(map(str, fields.get("keras_modules") or ()))
        lines = ["import keras", "import numpy as np"]
        lines += [f"import {each}  # has layers of the model" for each in modules]
        one = f"given[{_text(inputs[0]['name'])}]" if len(inputs) == 1 else _SEVERAL
        by_output = {name: _answer(links[name], name) for name in links}
        joined = ", ".join(f"{_text(name)}: {each}" for name, each in by_output.items())
        answers = by_output.get("", f"{{{joined}}}")
        begin = _BEGIN.format(imports="\n".join(lines), folder=_text(folder))
        found["Keras"] = begin + _KERAS.format(inputs=one, answers=answers)
    if fields.get("saved_model"):
        lines = ["import numpy as np", "import tensorflow as tf"]
        begin = _BEGIN.format(imports="\n".join(lines), folder=_text(folder))
        found["SavedModel"] = begin + _SAVED_MODEL
    return found


def _answer(link: Any, name: str) -> str:
    """Return a Python expression that converts an output to probabilities or label units."""
    output = f"outputs[{_text(name)}]" if name else "outputs"
    if isinstance(link, list):
        mean, std = map(float, link)
        return f"{output} * {std!r} + {mean!r}"
    if link == "first":
        return f"keras.ops.sigmoid({output}[:, :1])"
    return f"keras.ops.{link}({output})" if link in {"softmax", "sigmoid"} else output


def _text(value: Any) -> str:
    """Return a Python literal in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)
