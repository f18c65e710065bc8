"""Tests that `flotilla checkpoint show` lists a checkpoint's contents without TensorFlow."""

import json

import pytest

from flotilla.pipelines import models
from flotilla.pipelines.cli import app
from flotilla.pipelines.models import ModelDetails, ModelVersion
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import StoredVariable
from flotilla.trainer.report.heading import programs

VARIABLES = {
    "model/table": {"dtype": "float32", "shape": [1000, 16], "part": 1},
    "global_step": {"dtype": "int64", "shape": [], "part": 0},
    "damaged": {"dtype": 5},
}
FIELDS = {"global_step": 20, "variables": VARIABLES}


@pytest.fixture
def checkpoints(tmp_path):
    """Return the URI of checkpoints at step 10 (written by an older version) and step 20."""
    uri = storage.uri_of(tmp_path / "runs" / "digits-1" / "checkpoints")
    for step, fields in ((10, {"global_step": 10}), (20, FIELDS)):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        for number in range(step // 10):
            (folder / f"variables.data-0000{number}-of-0000{step // 10}").write_bytes(b"1234")
        storage.publish(folder, f"{uri}/step-{step:08d}", kind="checkpoint", fields=fields)
    return uri


def show(capsys, *words):
    return (app.call(["checkpoint", "show", *words]), *capsys.readouterr())


def test_the_newest_is_listed_and_an_older_one_says_less(checkpoints, capsys):
    code, out, _ = show(capsys, checkpoints, "--json")
    assert code == 0
    answer = json.loads(out.splitlines()[-1])
    assert answer["artifacts"]["checkpoint"].endswith("step-00000020")
    found = answer["checkpoint"]
    assert (found["global_step"], found["parts"], found["bytes"]) == (20, [4, 4], 8)
    table = {**VARIABLES["model/table"], "rows": 1000, "bytes": 64_000}
    assert found["variables"]["model/table"] == table
    assert found["variables"]["global_step"]["rows"] == 1
    assert "damaged" not in found["variables"]
    _, out, _ = show(capsys, checkpoints)
    assert all(each in out for each in ("2 parts", "64 kB", "1,000"))
    code, out, _ = show(capsys, f"{checkpoints}/step-00000010")
    assert (code, "global step 10" in out, "lists no variables" in out) == (0, True, True)


@pytest.fixture
def newest(checkpoints, tmp_path):
    """Return a function that publishes a checkpoint with some fields and returns its URI."""
    uri = f"{checkpoints}/step-00000030"

    def publish(**fields):
        storage.publish(tmp_path / "20", uri, kind="checkpoint", fields=fields)
        return uri

    return publish


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float32", "shape": [-1], "part": 0},
        {"dtype": "float32", "shape": [2**62] * 40, "part": 0},
        {"dtype": "float32", "shape": [1], "part": -1},
    ],
)
def test_a_variable_that_cannot_be_is_left_out(newest, capsys, wrong):
    uri = newest(global_step=30, variables={"a": wrong, "b": {"dtype": "bool", "shape": [3]}})
    code, out, _ = show(capsys, uri, "--json")
    assert code == 0
    assert list(json.loads(out.splitlines()[-1])["checkpoint"]["variables"]) == ["b"]


@pytest.mark.parametrize("step", ["abc", None, [1]])
def test_a_manifest_without_a_step_is_one_line(newest, capsys, step):
    code, _, err = show(capsys, newest(global_step=step))
    assert code == 1
    assert err.splitlines()[-1].endswith("has no global step: use another checkpoint")


def test_bytes_are_those_of_the_type():
    sizes = {"float8_e4m3fn": 1, "bfloat16": 2, "complex128": 16, "bool": 1, "string": 0}
    assert {each: StoredVariable(dtype=each, shape=()).bytes for each in sizes} == sizes


@pytest.mark.usefixtures("checkpoints")
def test_what_is_no_checkpoint_is_one_line(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    storage.publish(folder, storage.uri_of(tmp_path / "m"), kind="model", fields={})
    code, _, err = show(capsys, storage.uri_of(tmp_path / "m"))
    assert (code, "is a model, not a checkpoint" in err) == (1, True)
    code, _, err = show(capsys, "nope", "--workdir", str(tmp_path / "runs"))
    assert (code, "no run 'nope' below" in err) == (2, True)


OF_MODEL = {
    "formats": ["keras"], "links": {"mood": "softmax", "age": [40.0, 9.0]}, "saved_model": "s",
    "inputs": [{"feature": each, "name": each, "dtype": "string"} for each in ("a", "b")],
}  # fmt: skip


def test_the_page_of_a_model_has_a_program_that_can_be_copied(capsys, monkeypatch):
    version = ModelVersion(
        name="m", version=1, champion=True, main_metric="loss", better="lower", metrics={},
        measured={}, global_step=1, created="", run_id="", verdict="promoted",
    )  # fmt: skip
    details = ModelDetails(
        version=version, uri="file:///m", lineage={}, promotions=(), fields=OF_MODEL
    )
    monkeypatch.setattr(models, "show", lambda *_args, **_named: details)
    assert app.call(["models", "show", "m"]) == 0
    program = programs("/m", OF_MODEL)["Keras"]
    assert f"\nIn Python:\n\n{program}\n" in capsys.readouterr().out
    assert '{"mood": keras.ops.softmax(outputs["mood"]), "age": outputs["age"] * 9.0' in program
    compile(program, "program", "exec")
