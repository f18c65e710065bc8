"""Tests that a pipeline refuses to run if its steps differ from those of its image."""

import inspect
import re
import sys

import pytest
import yaml
from kfp import dsl

from flotilla.components import image, prepare_data, sweeps
from flotilla.components.records.record import run
from flotilla.components.table import STEPS
from flotilla.pipelines.compile import compile_components, compile_pipeline
from flotilla.pipelines.training import COMPONENTS
from flotilla.trainer import storage
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.runtime.errors import ConfigError
from tests.components.called_steps import refused

OTHER = "0.9.7 0123456789ab"


def compiled(monkeypatch, mark):
    monkeypatch.setattr(sys, "argv", ["executor", *([image.MARK_OPTION, mark] if mark else [])])


@pytest.mark.parametrize("step", [step.name for step in STEPS])
def test_every_step_counts(monkeypatch, step):
    real, before = image._signature, image._digest.__wrapped__()

    def changed(name):
        return real(name).replace("str", "int", 1) if name == step else real(name)

    monkeypatch.setattr(image, "_signature", changed)
    assert image._digest.__wrapped__() != before == image._digest()


def test_a_signature_is_names_types_and_what_is_returned():
    assert image._signature("train_model").startswith("train_model(config: str, root: str, ")
    assert image._signature("train_model").endswith(") -> str")
    with pytest.raises(LookupError, match="no function table"):
        image._signature("table")


def test_a_component_that_calls_another_function_of_the_image_needs_another_revision():
    every = (*COMPONENTS, sweeps.run_trial, sweeps.choose_trial, sweeps.finish_sweep)
    sources = "".join(inspect.getsource(each.python_func) for each in every)
    called = set(re.findall(r"    from flotilla\.components\.(\S+) import (\w+)\n", sources))
    of_sweeps = {("sweeps", name) for name in ("choose", "end_sweep", "train_trial")}
    expected = {(step.name, "work") for step in STEPS} | of_sweeps | {("records.record", "run")}
    assert (image._REVISION, called) == (4, expected)


def test_the_version_is_no_part_of_it(monkeypatch):
    _, _, digest = image.own_mark().partition(" ")
    compiled(monkeypatch, f"7.7.7 {digest}")
    image.check_mark()


def test_the_first_step_has_the_mark_in_the_pipeline_and_alone(tmp_path):
    compile_pipeline(tmp_path / "pipeline.yaml")
    compile_components(tmp_path)
    for name in ("pipeline.yaml", "prepare-data.yaml"):
        spec = next(yaml.load_all((tmp_path / name).read_text(), yaml.CSafeLoader))
        container = spec["deploymentSpec"]["executors"]["exec-prepare-data"]["container"]
        assert container["args"][-2:] == [image.MARK_OPTION, image.own_mark()]
    assert image.MARK_OPTION not in (tmp_path / "train-model.yaml").read_text()


def test_an_option_without_a_mark_is_none():
    assert image.find_mark(["executor", image.MARK_OPTION]) == ""
    assert image.find_mark(["executor", image.MARK_OPTION, "1 x", "--more"]) == "1 x"


@pytest.mark.parametrize(
    ("compiled_by", "theirs"),
    [("", "an unknown version of Flotilla"), (OTHER, "Flotilla 0.9.7 (steps 0123456789ab)")],
    ids=["older", "newer"],
)
def test_another_pipeline_is_refused_in_one_line_with_both(monkeypatch, compiled_by, theirs):
    compiled(monkeypatch, compiled_by)
    with pytest.raises(ConfigError) as caught:
        image.check_mark()
    line = str(caught.value)
    said = f"the pipeline was compiled by {theirs}, but the image contains Flotilla "
    assert line.startswith(said)
    assert f"(steps {image.own_mark().partition(' ')[2]})" in line
    assert "flotilla upload" in line


def older(values):
    """Return the arguments of a pipeline compiled before the input `batch_size` existed."""
    return {name: value for name, value in values.items() if name != "batch_size"}


def newer(values):
    """Return the arguments of a pipeline with a renamed artifact and an additional input."""
    artifact = values["configuration"]
    rest = {name: value for name, value in values.items() if name != "configuration"}
    return {**rest, "new": 5, "source": artifact}


@pytest.mark.parametrize(("passed", "compiled_by"), [(older, ""), (newer, OTHER)])
def test_the_first_step_refuses_before_it_looks_at_what_was_passed(
    monkeypatch, tmp_path, capsys, passed, compiled_by
):
    compiled(monkeypatch, compiled_by)
    root = storage.uri_of(tmp_path / "root")
    given = {parameter.name: parameter.default for parameter in FIELDS}
    artifact = dsl.Artifact(uri="/here/flotilla-training/123/prepare-data/configuration")
    whole = {**given, "storage_root": root, "kfp_run_id": "123", "configuration": artifact}
    code, line = refused(run, prepare_data.work, passed(whole), capsys=capsys)
    assert code != 0
    assert line.startswith("the pipeline was compiled by ")
    assert "with different steps" in line
    # A command that waits for the run prints this line from the step's record.
    records = [path for path in (tmp_path / "root").rglob("*.json") if "resolve" in str(path)]
    assert any("with different steps" in path.read_text() for path in records)
