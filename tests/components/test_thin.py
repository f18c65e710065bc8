"""The KFP components: each imports the body of its own file, and runs it with its inputs."""

import ast
import inspect
from importlib import import_module

import pytest
from kfp import dsl

from components.image import IMAGE
from components.pod_parameters import step_parameters
from components.resolve_config import resolve_config
from pipelines.training import COMPONENTS
from trainer.config.run_parameters import run_parameters


def function_of(component):
    source = inspect.getsource(component.python_func)
    return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))


@pytest.fixture(params=COMPONENTS, ids=lambda component: component.name)
def component(request):
    return request.param


def test_its_body_is_imports_and_one_call(component):
    name, body = component.python_func.__name__, function_of(component).body
    said = [ast.unparse(each) for each in body[1:]]
    if component is resolve_config:
        # Pipelines of every version make this call.
        expected = [f"from components.{name} import run_step", "return run_step(locals())"]
        assert said == expected
        return
    *imported, call = said
    frame = "from components.records.record import run"
    assert sorted(imported) == sorted([f"from components.{name} import work", frame])
    assert call.removeprefix("return ") == "run(work, locals())"


def test_its_work_reads_only_what_it_takes(component):
    module = import_module(component.python_func.__module__)
    taken = {*inspect.signature(component.python_func).parameters, "output"}
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module.work)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "step"
    }
    assert read <= taken


def test_its_image_is_the_one_and_it_installs_nothing(component):
    container = component.component_spec.implementation.container
    assert container.image == IMAGE
    assert "pip" not in " ".join(container.command[:3])


def test_it_says_what_it_does(component):
    assert inspect.getdoc(component.python_func)


def test_the_first_step_takes_exactly_the_run_parameters():
    taken = inspect.signature(resolve_config.python_func).parameters
    expected = [(p.name, p.type) for p in run_parameters()]
    own = [("kfp_run_id", str), ("configuration", dsl.Output[dsl.Artifact])]
    pods = [(p.name, p.type) for p in step_parameters() if p.fails_driver]
    assert [(p.name, p.annotation) for p in taken.values()] == [*expected, *own, *pods]


def test_only_the_parameters_of_pods_may_be_left_out_by_a_pipeline_of_ones_own():
    taken = inspect.signature(resolve_config.python_func).parameters.values()
    given = {p.name: p.default for p in taken if p.default is not inspect.Parameter.empty}
    assert given == {p.name: p.default for p in step_parameters() if p.fails_driver}
