"""Adds the files of an MLflow model to a registered model.

    MLmodel               the flavors `python_function`, which predicts raw rows with the program in
                          `mlflow/`, and `tensorflow`, which is the SavedModel
    requirements.txt, python_env.yaml, conda.yaml
    input_example.json, serving_input_example.json
    mlflow/               the program and `model.json`, see `pyfunc_loader`

The files follow MLflow's documented format
(https://mlflow.org/docs/latest/ml/model/#storage-format), so that an export does not need the
MLflow package.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime.json_records import finite

#: The file that makes a folder an MLflow model.
FILE = "MLmodel"
FOLDER = "mlflow"
EXAMPLE, SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"
REQUIREMENTS = "requirements.txt"
_PROGRAM = Path(__file__).with_name("pyfunc_loader.py")
# Maximum numbers of rows and of input values in a prediction batch.
_MOST_ROWS, _MOST_VALUES = 1000, 16 << 20
_MOST_NAMED = 1000
_TYPES = {
    "float32": "float", "float64": "double", "int32": "integer", "int64": "long",
    "bool": "boolean", "string": "string",
}  # fmt: skip
# MLflow rejects an int if the signature has a float. Therefore a column accepts any type if its
# values may be of several types, such as ints with missing values, timestamps, or numeric strings.
_ANY = {"type": "any"}
_NEEDS = {
    "classification": ("probabilities",),
    "sequence_to_label": ("probabilities",),
    "binary_classification": ("probability",),
    "multilabel_classification": ("probabilities",),
    "sequence_labelling": ("probabilities",),
    "ranking": ("logit", "probability"),
    "recommendation": ("logit", "probability"),
}


def write(folder: Path, fields: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Add the files of an MLflow model to a registered model.

    Args:
        folder: the files of the version.
        fields: the fields of its manifest.
        kinds: the task of each output, such as `regression`, keyed by the output's name.
    """
    if "reads" not in fields:
        # The model was exported by an earlier version of Flotilla, which did not record its inputs.
        return
    inputs = [*_list_inputs(fields)]
    lines = folder / "labels.txt"
    labels = lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else []
    outputs = [*_list_outputs(fields, kinds, labels)]
    program = _PROGRAM.read_bytes()
    # Use a unique name, because a process may load models of several versions.
    module = f"flotilla_model_{hashlib.sha256(program).hexdigest()[:12]}"
    # The folder exists if another run took the version number and this is a second attempt.
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"{module}.py").write_bytes(program)
    values = sum(math.prod(size or 1 for size in each["shape"]) for each in inputs)
    size = max(1, min(_MOST_ROWS, _MOST_VALUES // max(1, values)))
    saved = fields["saved_model"]
    tree = {"saved_model": saved, "size": size, "inputs": inputs, "outputs": outputs}
    _write_json(folder / FOLDER / "model.json", tree)
    example = _write_example(folder, inputs)
    signature = {
        "inputs": json.dumps(_input_schema(inputs)),
        "outputs": json.dumps([*_output_schema(fields, outputs)]),
        "params": None,
    }
    model = {**_describe(fields, module), "signature": signature, **example}
    _write_yaml(folder / FILE, model)
    _write_environment(folder, _list_requirements(inputs))


def _describe(fields: Mapping[str, Any], module: str) -> dict[str, Any]:
    lineage, source = fields.get("lineage", {}), fields.get("source", {})
    facts = {"version": fields.get("version"), "task": fields.get("task")}
    facts |= {key: lineage.get(key) for key in ("run_id", "dataset", "fingerprint", "commit")}
    identity = json.dumps([source, fields.get("version")], sort_keys=True)
    environment = {"conda": "conda.yaml", "virtualenv": "python_env.yaml"}
    found = {
        "flavors": {
            "python_function": {
                "code": FOLDER,
                "env": environment,
                "loader_module": module,
                "python_version": platform.python_version(),
            },
            "tensorflow": {
                "saved_model_dir": fields["saved_model"],
                "meta_graph_tags": ["serve"],
                "signature_def_key": "serving_default",
            },
        },
        "metadata": {f"flotilla.{key}": value for key, value in facts.items() if value},
        "model_uuid": uuid.uuid5(uuid.NAMESPACE_URL, identity).hex,
        "utc_time_created": str(source.get("created", "")).replace("T", " ").removesuffix("Z"),
    }
    version = _find_version("mlflow-skinny") or _find_version("mlflow")
    return {**found, "mlflow_version": version} if version else found


def _list_inputs(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    arguments = {each["feature"]: each["name"] for each in fields["inputs"]}
    varying = {each["feature"] for each in fields["reads"] if None in each["shape"]}
    lengths = {length_name(name): name for name in varying}
    for each in fields["reads"]:
        yield {
            "feature": each["feature"],
            "argument": arguments[each["feature"]],
            "type": each["type"] or ("image" if each["stored"] == "image" else ""),
            **{key: each[key] for key in ("shape", "dtype", "labels", "padding")},
            "length_of": lengths.get(each["feature"], ""),
        }


def _list_outputs(
    fields: Mapping[str, Any], kinds: Mapping[str, str], labels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    keys = [each["name"] for each in fields["outputs"]]
    threshold = fields.get("threshold")
    thresholds = threshold if isinstance(threshold, Mapping) else {"": threshold}
    for name, kind in kinds.items():
        answers = {key: key for key in keys}
        if name:
            # A column belongs to the output with the longest name that the column starts with.
            answers = {
                key.removeprefix(f"{name}_"): key
                for key in keys
                if max((each for each in kinds if key.startswith(f"{each}_")), key=len) == name
            }
        # Clear the kind if outputs are missing, as in a user's task derived from a built-in one.
        is_known = all(each in answers for each in _NEEDS.get(kind, ()))
        yield {
            "name": name,
            "kind": kind if is_known else "",
            "labels": list((fields.get("labels") or {}).get(name) or ("" if name else labels)),
            "threshold": 0.5 if (chosen := thresholds.get(name)) is None else chosen,
            "answers": answers,
        }


def _is_tensors(inputs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the model takes tensors: all inputs are arrays of fixed shape, no images."""
    return all(
        each["shape"] and None not in each["shape"] and each["type"] != "image" for each in inputs
    )


def _input_schema(inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if _is_tensors(inputs):
        dtypes = ["str" if each["dtype"] == "string" else str(each["dtype"]) for each in inputs]
        return [
            {
                "name": each["feature"],
                "type": "tensor",
                "tensor-spec": {"dtype": dtype, "shape": [-1, *each["shape"]]},
            }
            for each, dtype in zip(inputs, dtypes, strict=True)
        ]
    return [
        {"name": each["feature"], "required": not each["length_of"], **_column_type(each)}
        for each in inputs
    ]


def _column_type(wanted: Mapping[str, Any]) -> dict[str, Any]:
    kind, dtype = wanted["type"], wanted["dtype"]
    if wanted["shape"]:
        return _ANY if kind == "image" else _nested(_ANY, len(wanted["shape"]))
    if kind == "bool" or dtype == "string" or wanted["labels"]:
        return {"type": "boolean" if kind == "bool" else "string"}
    if kind in ("", "float"):
        return {"type": "double" if "float" in dtype else _TYPES.get(dtype, "long")}
    return {"type": "long"} if dtype == "int64" else _ANY


def _output_schema(
    fields: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    specs = {each["name"]: each for each in fields["outputs"]}
    for output in outputs:
        before = f"{output['name']}/" if output["name"] else ""
        for name, kind in _columns(output, specs):
            yield {"name": f"{before}{name}", "required": True, **kind}


def _columns(
    output: Mapping[str, Any], specs: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    kind, answers = output["kind"], output["answers"]
    text, number = {"type": "string"}, {"type": "float"}
    if kind in ("ranking", "recommendation"):
        yield from (("score", number), ("probability", number))
    elif kind == "sequence_labelling":
        depth = max(1, len(specs[answers["probabilities"]]["shape"]) - 1)
        yield from (("prediction", _nested(text, depth)), ("probability", _nested(number, depth)))
    elif kind == "regression" or kind not in _NEEDS:
        for name, key in answers.items():
            one = {"type": _TYPES.get(specs[key]["dtype"], "double")}
            yield name, _nested(one, len(specs[key]["shape"]))
    else:
        yield "prediction", _nested(text, int(kind == "multilabel_classification"))
        if kind != "multilabel_classification":
            yield "probability", number
        names = output["labels"]
        if kind != "binary_classification":
            count = (specs[answers["probabilities"]]["shape"] or [len(names)])[-1] or len(names)
            names = names if len(names) == count else [str(each) for each in range(count)]
        if len(names) > _MOST_NAMED or len({*names}) < len(names):
            yield "probabilities", _nested(number, 1)
        else:
            yield from ((f"probabilities/{name}", number) for name in names)


def _nested(kind: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        kind = {"type": "array", "items": kind}
    return kind


def _write_example(folder: Path, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the examples of `request.json`, if any, and return their entry for `MLmodel`."""
    if not (folder / "request.json").is_file():
        return {}
    rows = json.loads((folder / "request.json").read_bytes())["instances"]
    if _is_tensors(inputs):
        named = {each["feature"]: [row[each["argument"]] for row in rows] for each in inputs}
        served: dict[str, Any] = {"inputs": named}
        example = named
        kind = {"type": "ndarray", "format": "tf-serving"}
    else:
        columns = [each["feature"] for each in inputs]
        data = [
            [finite(_name_class(each, row[each["argument"]])) for each in inputs] for row in rows
        ]
        example = {"columns": columns, "data": data}
        served = {"dataframe_split": example}
        kind = {"type": "dataframe", "pandas_orient": "split"}
    _write_json(folder / EXAMPLE, example)
    _write_json(folder / SERVING_EXAMPLE, served)
    paths = {"artifact_path": EXAMPLE, "serving_input_path": SERVING_EXAMPLE}
    return {"saved_input_example_info": {**kind, **paths}}


def _name_class(wanted: Mapping[str, Any], value: Any) -> Any:
    labels = wanted["labels"]
    return labels[value] if labels and not wanted["shape"] and 0 <= value < len(labels) else value


def _list_requirements(inputs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the packages that the program imports, pinned to the installed versions."""
    mlflow = _find_version("mlflow") or _find_version("mlflow-skinny")
    found = [f"mlflow=={mlflow}" if mlflow else "mlflow>=3,<4"]
    names = ["tensorflow", "numpy"]
    names += ["pillow"] if any(each["type"] == "image" for each in inputs) else []
    return [*found, *(f"{name}=={at}" for name in names if (at := _find_version(name)))]


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _write_environment(folder: Path, requirements: Sequence[str]) -> None:
    (folder / REQUIREMENTS).write_text("\n".join([*requirements, ""]), encoding="utf-8")
    python = platform.python_version()
    environment = {
        "python": python,
        "build_dependencies": ["pip", "setuptools", "wheel"],
        "dependencies": [f"-r {REQUIREMENTS}"],
    }
    _write_yaml(folder / "python_env.yaml", environment)
    packages = [f"python={python}", "pip", {"pip": list(requirements)}]
    conda = {"name": "mlflow-env", "channels": ["conda-forge"], "dependencies": packages}
    _write_yaml(folder / "conda.yaml", conda)


def _write_json(path: Path, tree: object) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_yaml(path: Path, tree: object) -> None:
    path.write_text(yaml.safe_dump(tree, sort_keys=True, allow_unicode=True), encoding="utf-8")
