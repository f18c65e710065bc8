"""Tests that a registered model is an MLflow model for every kind of input and output."""

import json

import pytest
import yaml

from flotilla.trainer.tracking import mlflow_model

SCALAR = {"shape": [], "stored": "", "num_classes": 0, "labels": [], "padding": 0}


def entry(feature, kind, dtype, **fields):
    return {**SCALAR, "feature": feature, "type": kind, "dtype": dtype, **fields}


def manifest(*reads, outputs=(("prediction", []),), **fields):
    return {
        "reads": list(reads),
        "inputs": [
            {"feature": each["feature"], "name": each["feature"].replace(" ", "_")}
            for each in reads
        ],
        "outputs": [{"name": n, "shape": shape, "dtype": "float32"} for n, shape in outputs],
        "saved_model": "serving/m/3",
        "version": 3,
        "lineage": {"run_id": "m-1", "fingerprint": "abc", "commit": ""},
        "source": {"uri": "file:///m", "created": "2026-01-02T03:04:05.678Z"},
        **fields,
    }


def write(folder, fields, kinds, labels=(), rows=None):
    names = [each["name"] for each in fields["inputs"]]
    rows = rows or [dict.fromkeys(names, 1)]
    (folder / "request.json").write_text(json.dumps({"instances": rows}))
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    mlflow_model.write(folder, fields, kinds)
    model = yaml.safe_load((folder / "MLmodel").read_text())
    signature = {key: json.loads(model["signature"][key]) for key in ("inputs", "outputs")}
    return model, signature


def types(columns):
    return {each["name"]: each["type"] for each in columns}


def test_a_table_has_a_column_for_each_input_and_an_example(tmp_path):
    fields = manifest(
        entry("a b", "text", "string"),
        entry("count", "int", "int64"),
        entry("gaps", "int", "float32"),
        entry("size", "float", "float32"),
        entry("paid", "number", "float32"),
        entry("at", "time", "float64"),
        entry("on", "bool", "bool"),
        entry("kind", "class", "int64", labels=["x", "y"]),
    )
    row = {"a_b": "t", "count": 1, "gaps": float("nan"), "size": 1.5, "paid": 2.0, "at": 3.0,
           "on": True, "kind": 1}  # fmt: skip
    model, signature = write(tmp_path, fields, {"": "regression"}, rows=[row])
    assert types(signature["inputs"]) == {
        "a b": "string", "count": "long", "gaps": "any", "size": "double", "paid": "any",
        "at": "any", "on": "boolean", "kind": "string",
    }  # fmt: skip
    assert types(signature["outputs"]) == {"prediction": "float"}
    assert model["metadata"] == {
        "flotilla.version": 3, "flotilla.run_id": "m-1", "flotilla.fingerprint": "abc",
    }  # fmt: skip
    assert model["utc_time_created"] == "2026-01-02 03:04:05.678"
    assert model["flavors"]["tensorflow"]["saved_model_dir"] == "serving/m/3"
    example = json.loads((tmp_path / "input_example.json").read_text())
    assert example["columns"][:3] == ["a b", "count", "gaps"]
    assert example["data"] == [["t", 1, None, 1.5, 2.0, 3.0, True, "y"]]
    served = json.loads((tmp_path / "serving_input_example.json").read_text())
    assert served == {"dataframe_split": example}


def test_the_environment_is_pinned(tmp_path, monkeypatch):
    write(tmp_path, manifest(entry("a", "float", "float32")), {"": "regression"})
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert [line.partition("==")[0] for line in lines] == ["mlflow", "tensorflow", "numpy"]
    assert all("==" in line for line in lines)
    python = yaml.safe_load((tmp_path / "python_env.yaml").read_text())
    conda = yaml.safe_load((tmp_path / "conda.yaml").read_text())
    assert python["dependencies"] == ["-r requirements.txt"]
    assert conda["dependencies"] == [f"python={python['python']}", "pip", {"pip": lines}]
    known = {"tensorflow": "2.21.0", "numpy": "2.0"}
    monkeypatch.setattr(mlflow_model, "_find_version", lambda name: known.get(name, ""))
    model, _ = write(tmp_path, manifest(entry("a", "float", "float32")), {"": "regression"})
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert lines == ["mlflow>=3,<4", "tensorflow==2.21.0", "numpy==2.0"]
    assert "mlflow_version" not in model


def test_arrays_of_one_shape_are_tensors_and_lists_are_arrays(tmp_path):
    pixels = entry("image", "", "uint8", shape=[2, 2, 1], stored="raw")
    outputs = (("logits", [2]), ("probabilities", [2]))
    for name, stored in (("raw", "raw"), ("file", "image")):
        (tmp_path / name).mkdir()
        fields = manifest({**pixels, "stored": stored}, outputs=outputs)
        _, signature = write(tmp_path / name, fields, {"": "classification"}, ["cat", "dog"])
        (column,) = signature["inputs"]
        example = json.loads((tmp_path / name / "input_example.json").read_text())
        if stored == "raw":
            assert column["tensor-spec"] == {"dtype": "uint8", "shape": [-1, 2, 2, 1]}
            assert example == {"image": [1]}
        else:
            assert column == {"name": "image", "required": True, "type": "any"}
            requirements = (tmp_path / name / "requirements.txt").read_text()
            assert "pillow==" in requirements
        assert types(signature["outputs"]) == {
            "prediction": "string", "probability": "float",
            "probabilities/cat": "float", "probabilities/dog": "float",
        }  # fmt: skip
    words = entry("words", "tensor", "string", shape=[None], stored="sequence")
    length = entry("words_length", "", "int64")
    outputs = (("probabilities", [None, 2]),)
    _, signature = write(
        tmp_path, manifest(words, length, outputs=outputs), {"": "sequence_labelling"}, ["a", "b"]
    )
    assert signature["inputs"] == [
        {"name": "words", "required": True, "type": "array", "items": {"type": "any"}},
        {"name": "words_length", "required": False, "type": "long"},
    ]
    assert [each["items"]["type"] for each in signature["outputs"]] == ["string", "float"]


@pytest.mark.parametrize(
    ("kind", "outputs", "columns"),
    [
        ("ranking", ["logit", "probability"], ["score", "probability"]),
        ("recommendation", ["logit", "probability"], ["score", "probability"]),
        ("binary_classification", ["logit", "probability"],
         ["prediction", "probability", "probabilities/0", "probabilities/1"]),
        ("regression", ["prediction"], ["prediction"]),
        ("", ["mine", "other"], ["mine", "other"]),
        # A task derived from a built-in one may have other outputs.
        ("classification", ["mine"], ["mine"]),
    ],
)  # fmt: skip
def test_the_columns_of_each_kind_of_output(tmp_path, kind, outputs, columns):
    fields = manifest(entry("a", "float", "float32"), outputs=[(each, []) for each in outputs])
    _, signature = write(tmp_path, fields, {"": kind}, ["0", "1"])
    assert [each["name"] for each in signature["outputs"]] == columns


def test_outputs_have_their_names_before_the_columns_and_many_classes_one_column(tmp_path):
    outputs = (("a_b_prediction", []), ("a_logit", []), ("a_probability", []))
    fields = manifest(
        entry("x", "float", "float32"), outputs=outputs, threshold={"a": 0.25},
        labels={"a": ["no", "yes"]},
    )  # fmt: skip
    kinds = {"a": "binary_classification", "a_b": "regression"}
    _, signature = write(tmp_path, fields, kinds)
    assert [each["name"] for each in signature["outputs"]] == [
        "a/prediction", "a/probability", "a/probabilities/no", "a/probabilities/yes",
        "a_b/prediction",
    ]  # fmt: skip
    made = json.loads((tmp_path / "mlflow" / "model.json").read_text())
    assert [each["threshold"] for each in made["outputs"]] == [0.25, 0.5]
    assert made["outputs"][1]["answers"] == {"prediction": "a_b_prediction"}
    labels = [str(each) for each in range(1001)]
    fields = manifest(entry("x", "float", "float32"), outputs=[("probabilities", [1001])])
    _, signature = write(tmp_path, fields, {"": "classification"}, labels)
    assert [each["name"] for each in signature["outputs"]] == [
        "prediction", "probability", "probabilities",
    ]  # fmt: skip


def test_a_version_is_written_again_under_the_next_number(tmp_path):
    mlflow_model.write(tmp_path, {"saved_model": "serving/m/1"}, {})
    assert list(tmp_path.iterdir()) == []
    fields = manifest(entry("a", "float", "float32"))
    write(tmp_path, fields, {"": "regression"})
    model, _ = write(
        tmp_path, {**fields, "saved_model": "serving/m/4", "version": 4}, {"": "regression"}
    )
    assert model["flavors"]["tensorflow"]["saved_model_dir"] == "serving/m/4"
    made = json.loads((tmp_path / "mlflow" / "model.json").read_text())
    assert made["saved_model"] == "serving/m/4"


def test_the_same_version_is_the_same_files(tmp_path):
    fields = manifest(entry("a", "float", "float32"))
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, fields, {"": "regression"})
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1]
