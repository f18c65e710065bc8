"""Tests how KFP connects the steps of the compiled pipeline."""

import json

import pytest
import yaml

from flotilla.components.table import STEPS
from flotilla.pipelines.compile import compile_pipeline
from flotilla.pipelines.training import IMAGE_FIELD, PIPELINES, SIGNATURE, cluster_pipeline
from flotilla.trainer.config.form import FIELDS, to_form
from flotilla.trainer.config.load import load_config

KFP_TYPES = {str: "STRING", dict: "STRUCT", int: "NUMBER_INTEGER", float: "NUMBER_DOUBLE"}


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    pipeline, _ = yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return pipeline


def below(spec, group):
    return spec["components"][f"comp-{group}"]["dag"]["tasks"]


@pytest.fixture(scope="module")
def main_tasks(spec):
    return below(spec, "exit-handler-1")


@pytest.fixture(scope="module")
def ready(spec):
    return below(spec, "condition-2")


def inputs_of(task):
    return task["inputs"]["parameters"]


def source_of(task, name):
    found = inputs_of(task)[name]
    produced = found["taskOutputParameter"]
    return produced["producerTask"], produced["outputParameterKey"]


def all_tasks(spec):
    folders = [spec["root"], *spec["components"].values()]
    return {
        name: task
        for each in folders
        if "dag" in each
        for name, task in each["dag"]["tasks"].items()
    }


def test_the_run_parameters_are_the_form_and_the_image(spec):
    given = spec["root"]["inputDefinitions"]["parameters"]
    assert set(given) == {each.name for each in FIELDS} | {"image"} == set(SIGNATURE.parameters)
    assert len(given) == 15
    for field in (*FIELDS, IMAGE_FIELD):
        assert given[field.name] == {
            "parameterType": KFP_TYPES[field.type],
            "defaultValue": SIGNATURE.parameters[field.name].default,
            "isOptional": True,
            "description": field.description,
            **({"literals": list(field.choices)} if field.choices else {}),
        }
    # A step receives one value for the run; only the form and the API use the list of values.
    assert "literals" not in json.dumps(spec["components"])


def test_the_signature_and_the_description(spec):
    # The image is just before where a run publishes. KFP calls the pipeline by position.
    names = list(SIGNATURE.parameters)
    assert names == [*(each.name for each in FIELDS[:-2]), "image", "storage_root", "settings"]
    kinds = {parameter.kind.name for parameter in SIGNATURE.parameters.values()}
    assert kinds == {"POSITIONAL_OR_KEYWORD"}
    assert spec["pipelineInfo"]["description"].startswith("Train a model, and promote it")


def test_a_configuration_is_the_defaults_of_the_form():
    config = load_config(None, ["training.steps=7", "model.name=own.nets:wide", "data.shards=4"])
    spec = cluster_pipeline(config=config).pipeline_spec
    declared = spec.root.input_definitions.parameters
    values = to_form(config)
    assert declared["steps"].default_value.number_value == 7
    assert declared["model"].default_value.string_value == "settings"
    assert values["settings"] == {"model": {"name": "own.nets:wide"}, "data": {"shards": 4}}
    assert "own.nets:wide" in str(declared["settings"].default_value)


def test_every_field_reaches_the_first_step(main_tasks):
    given = inputs_of(main_tasks["prepare-data"])
    for field in FIELDS:
        channel = given[field.name]["componentInputParameter"]
        assert channel.endswith(f"--{field.name}")
    assert given["kfp_run_id"]["runtimeValue"]["constant"] == "{{$.pipeline_job_uuid}}"


def test_the_exit_step_runs_after_everything(spec):
    tasks = spec["root"]["dag"]["tasks"]
    assert set(tasks) == {"exit-handler-1", "finish"}
    assert tasks["finish"]["dependentTasks"] == ["exit-handler-1"]
    assert tasks["finish"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    # The value comes from the form, because the first step may have failed.
    given = inputs_of(tasks["finish"])
    assert given["root"] == {"componentInputParameter": "storage_root"}
    assert given["settings"] == {"componentInputParameter": "settings"}
    assert given["status"]["taskFinalStatus"] == {"producerTask": "exit-handler-1"}


FROM_FIRST = "pipelinechannel--prepare-data-"


@pytest.mark.parametrize("step", ["train-model", "evaluate-model"])
def test_each_step_gets_the_run_and_what_the_one_before_has_published(ready, step):
    sources = {name: name for name in ("config", "root", "run_id")} | {"dataset": "dataset_uri"}
    for name, output in sources.items():
        given = {"componentInputParameter": f"{FROM_FIRST}{output}"}
        assert inputs_of(ready[step])[name] == given
    assert source_of(ready["evaluate-model"], "checkpoint") == ("train-model", "Output")


def artifacts_of(task):
    """Return the source step and output of each input artifact of a task."""
    found = {}
    for name, given in task["inputs"].get("artifacts", {}).items():
        if from_above := given.get("componentInputArtifact"):
            found[name] = from_above
        else:
            made = given["taskOutputArtifact"]
            found[name] = f"{made['producerTask']}/{made['outputArtifactKey']}"
    return found


def test_artifacts_flow_from_step_to_step_next_to_their_uris(spec):
    dataset, checkpoint = "prepare-data/dataset", "train-model/checkpoint"
    expected = {
        "train-model": {"dataset_descriptor": "dataset"},
        "evaluate-model": {"dataset_descriptor": "dataset", "checkpoint_descriptor": checkpoint},
        # The inputs of a group are named as in KFP's graph.
        "condition-2": {"dataset": dataset},
        "condition-3": {
            "dataset": "dataset", "checkpoint": checkpoint, "decision": "evaluate-model/decision",
        },
        "export-model": {
            f"{name}_descriptor": name for name in ("dataset", "checkpoint", "decision")
        },
    }  # fmt: skip
    tasks = all_tasks(spec)
    assert {name: artifacts_of(tasks[name]) for name in expected} == expected
    for name in ("condition-2", "condition-3"):
        group = spec["components"][f"comp-{name}"]["inputDefinitions"]["artifacts"]
        assert set(group) == set(expected.pop(name))
    for name, artifacts in expected.items():
        given = inputs_of(tasks[name])
        assert {each.removesuffix("_descriptor") for each in artifacts} < set(given)


def test_each_artifact_has_the_name_and_the_type_of_what_it_shows(spec):
    found = {
        name.removeprefix("comp-"): {
            key: each["artifactType"]["schemaTitle"].removeprefix("system.")
            for key, each in component["outputDefinitions"]["artifacts"].items()
        }
        for name, component in spec["components"].items()
        if "artifacts" in component.get("outputDefinitions", {})
    }
    assert found == {
        "prepare-data": {
            "configuration": "Artifact", "dataset": "Dataset", "validation": "Artifact",
            "page": "HTML",
        },
        # The second name is required by KFP's UI, which otherwise does not offer TensorBoard.
        "train-model": {"checkpoint": "Model", "mlpipeline_ui_metadata": "Artifact"},
        "evaluate-model": {
            "evaluation_metrics": "Metrics", "confusion_matrix": "ClassificationMetrics",
            "roc_curve": "ClassificationMetrics", "decision": "Artifact",
        },
        "export-model": {"model": "Model", "registration": "Model"},
        "finish": {"report": "HTML", "summary": "Markdown"},
    }  # fmt: skip


def test_a_step_needs_no_artifact(spec):
    # A user's pipeline may have only the URI, from which KFP cannot create an artifact.
    for component in spec["components"].values():
        if "executorLabel" in component:
            taken = component["inputDefinitions"].get("artifacts", {})
            assert all(each["isOptional"] for each in taken.values())


def test_the_image_and_the_secret_of_the_run_are_handed_on(spec, ready):
    for task in (ready["train-model"], below(spec, "condition-3")["export-model"]):
        given = inputs_of(task)["image"]["componentInputParameter"]
        assert given == "pipelinechannel--image"
    secret = inputs_of(ready["train-model"])["store_secret"]["runtimeValue"]["constant"]
    assert secret == "mlpipeline-minio-artifact"


def test_a_run_trains_only_where_the_first_step_says_so(main_tasks, ready):
    condition = main_tasks["condition-2"]["triggerPolicy"]["condition"]
    assert condition == f"inputs.parameter_values['{FROM_FIRST}Output'] == 'ready'"
    assert set(main_tasks) == {"prepare-data", "condition-2"}
    assert set(ready) == {"train-model", "evaluate-model", "condition-3"}


def test_only_a_blessed_model_is_exported(spec, ready):
    condition = ready["condition-3"]["triggerPolicy"]["condition"]
    assert condition.endswith("== 'blessed'")
    assert "evaluate-model-Output" in condition
    steps = below(spec, "condition-3")
    assert set(steps) == {"export-model"}
    decision = inputs_of(steps["export-model"])["decision"]["componentInputParameter"]
    assert decision.endswith("evaluate-model-decision_uri")


def test_every_row_of_the_table_is_wired_once_and_never_comes_from_the_cache_of_kfp(spec):
    tasks = all_tasks(spec)
    wired = [task["componentRef"]["name"].removeprefix("comp-") for task in tasks.values()]
    steps = [name for name in wired if not name.startswith(("exit-handler", "condition"))]
    assert sorted(steps) == sorted(step.kfp_name for step in STEPS)
    assert not [name for name in steps if tasks[name]["cachingOptions"].get("enableCache")]


def test_the_short_pipelines():
    for name, steps in (
        ("prepare", ["prepare-data"]),
        ("train", ["condition-1", "prepare-data"]),
        ("train_on", ["prepare-data", "train-model"]),
    ):
        assert sorted(PIPELINES[name].pipeline_spec.root.dag.tasks) == steps
    # Training on a dataset takes its URI.
    spec = PIPELINES["train_on"].pipeline_spec
    given = spec.root.dag.tasks["prepare-data"].inputs.parameters["published"]
    assert given.component_input_parameter == "dataset"
    assert set(spec.root.input_definitions.parameters) == {*SIGNATURE.parameters, "dataset"}
