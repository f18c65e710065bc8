"""Tests that the table of steps and stages matches the files of the components."""

import ast
import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from kfp import compiler, dsl

from flotilla.components import table
from flotilla.components.image import IMAGE
from flotilla.components.prepare_data import Prepared, prepare_data
from flotilla.components.table import (
    EXIT_STEP,
    StageSpec,
    StepSpec,
    find_maker,
    find_step,
    find_step_of_stage,
)
from flotilla.pipelines.step_settings import NO_SETTINGS
from flotilla.pipelines.training import COMPONENTS, Wiring, load_component, local_pipeline
from flotilla.trainer.config.form import FIELDS

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for name in ("components", "pipelines", "trainer") for path in (ROOT / name).rglob("*.py")
]
NEW = StepSpec(
    name="count_labels",
    stages=(StageSpec(name="count_labels"),),
    deadline_seconds=60,
    retries=1,
    is_light=True,
)


@dsl.component(base_image="image", install_kfp_package=False)
def count_labels(dataset: str) -> str:
    return dataset


def counting(place, *values):
    Wiring(place, values).step(count_labels, dataset="gs://b/d")


def files():
    return {
        path.stem
        for path in (ROOT / "components").glob("*.py")
        if "\n@component\n" in path.read_text(encoding="utf-8") and path.stem != "sweeps"
    }


def test_every_file_with_a_component_has_one_row_and_every_row_its_file():
    names = [step.name for step in table.STEPS]
    assert sorted(names) == sorted(files())
    assert [component.name for component in COMPONENTS] == [s.kfp_name for s in table.STEPS]


def test_each_output_has_one_stage():
    outputs = [stage.output for stage in table.STAGES if stage.output]
    assert len(set(outputs)) == len(outputs)
    assert [find_maker(output).output for output in outputs] == outputs
    assert EXIT_STEP is table.STEPS[-1]


def test_each_stage_is_one_of_one_step():
    names = [stage.name for stage in table.STAGES]
    assert len(set(names)) == len(names)
    assert [find_step_of_stage(stage).name for stage in ("validate_data", "check_gate")] == [
        table.PREPARE, table.EVALUATE,
    ]  # fmt: skip
    with pytest.raises(LookupError, match="has no stage 'count_labels'"):
        find_step_of_stage("count_labels")


def test_a_record_of_another_version_has_no_row_and_ends_nothing():
    assert table.name_step_of("check_gate") == table.EVALUATE
    assert table.name_step_of("register_model\u2069") == "register_model\u2069"
    assert not table.ends_run("count_labels", "blessed")
    assert not table.ends_well("count_labels", "")


@pytest.mark.parametrize("name", ["train_model", "train-model"])
def test_a_step_has_two_names(name):
    assert find_step(name).loads == ""


def test_a_step_without_a_row_is_one_clear_error():
    message = "^components/table.py has no row for the step 'count-labels': add a row$"
    with pytest.raises(LookupError, match=message) as caught:
        local_pipeline(counting, "counting")
    assert not isinstance(caught.value, KeyError)


def test_a_row_without_a_file_names_the_file():
    with pytest.raises(ModuleNotFoundError, match=r"flotilla\.components\.count_labels"):
        load_component(NEW)


def test_with_its_row_a_new_step_is_set_up_as_the_row_says(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "STEPS", (*table.STEPS, NEW))
    pipeline = local_pipeline(lambda w: counting(NO_SETTINGS.apply, *w.given.values()), "counting")
    compiler.Compiler().compile(pipeline, str(tmp_path / "counting.yaml"))
    spec, platform = yaml.load_all(
        (tmp_path / "counting.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
    )
    task = spec["root"]["dag"]["tasks"]["count-labels"]
    assert task["retryPolicy"]["maxRetryCount"] == 1
    assert not task["cachingOptions"]
    container = spec["deploymentSpec"]["executors"]["exec-count-labels"]["container"]
    assert container["resources"]["resourceMemoryLimit"] == "2Gi"
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert int(pods["exec-count-labels"]["activeDeadlineSeconds"]) == 60


def named_in(path):
    """Return the names that a file may contain: its own and, for a step, its stages' names."""
    own = {path.stem, path.stem.replace("_", "-")}
    if path.parent == ROOT / "components" and path.stem in files():
        own |= {stage.name for stage in find_step(path.stem).stages}
    return own


def test_no_other_file_names_a_step_or_a_stage():
    names = {name for step in table.STEPS for name in (step.name, step.kfp_name)}
    names |= {stage.name for stage in table.STAGES}
    offenders = []
    for path in SOURCES:
        if path.name == "table.py":
            continue
        text, own = path.read_text(encoding="utf-8"), named_in(path)
        # Skip parsing a file that contains none of the names.
        if not any(f'"{name}"' in text for name in names - own):
            continue
        offenders += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}: ask flotilla.components.table"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and node.value in names - own
        ]
    assert not offenders, "\n".join(offenders)


def test_every_body_can_be_imported_inside_a_running_step():
    # KFP sets this variable in a running step, where `kfp.dsl` has no `component`.
    modules = ", ".join(f"flotilla.components.{step.name}" for step in table.STEPS)
    command = [sys.executable, "-c", f"import {modules}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "_KFP_RUNTIME": "true"}, check=True)


def test_it_loads_neither_kfp_nor_tensorflow():
    script = (
        "import sys, flotilla.components.table; print({'kfp', 'tensorflow'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.fixture(params=COMPONENTS, ids=lambda component: component.name)
def component(request):
    return request.param


def test_its_body_is_imports_and_one_call(component):
    name, source = component.python_func.__name__, inspect.getsource(component.python_func)
    [function] = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    *imported, call = [ast.unparse(each) for each in function.body[1:]]
    frame = "from flotilla.components.records.record import run"
    assert sorted(imported) == sorted([f"from flotilla.components.{name} import work", frame])
    assert call.removeprefix("return ") == "run(work, locals())"


def test_its_stages_read_only_what_they_take(component):
    module = import_module(component.python_func.__module__)
    # Names that `Step` provides, or that one stage passes to another.
    own = {"stage", "output", "at", *Prepared._fields, "evaluation", "model_uri"}
    taken = {*inspect.signature(component.python_func).parameters, *own}
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "step"
    }
    assert read <= taken


def test_its_image_is_the_one_it_installs_nothing_and_it_says_what_it_does(component):
    container = component.component_spec.implementation.container
    assert container.image == IMAGE
    assert "pip" not in " ".join(container.command[:3])
    assert inspect.getdoc(component.python_func)


def test_the_first_step_takes_the_fields_of_the_form_and_its_own():
    taken = inspect.signature(prepare_data.python_func).parameters
    fields = [(each.name, each.type) for each in FIELDS]
    assert [(each.name, each.annotation) for each in taken.values()][: len(fields)] == fields
    rest = list(taken.values())[len(fields) :]
    own = {each.name: each.default for each in rest if each.default is not each.empty}
    assert own == {"published": "", "is_whole_run": True}
