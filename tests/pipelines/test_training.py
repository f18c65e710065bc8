"""The wiring of the pipeline, as KFP has understood it."""

import json

import pytest
import yaml
from components.pod_parameters import step_parameters
from trainer.config.run_parameters import run_parameters

from components.table import STEPS
from pipelines.compile import compile_pipeline
from pipelines.training import PIPELINES, SIGNATURE

KFP_TYPES = {
    str: "STRING", dict: "STRUCT", list: "LIST", bool: "BOOLEAN",
    int: "NUMBER_INTEGER", float: "NUMBER_DOUBLE",
}  # fmt: skip


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
def news(spec):
    return below(spec, "condition-2")


@pytest.fixture(scope="module")
def accepted(spec):
    return below(spec, "condition-3")


def inputs_of(task):
    return task["inputs"]["parameters"]


def own_inputs_of(task):
    """Return what the code of a step gets, without what KFP keeps for its pod."""
    of_the_pod = {"base_image", "cpu_limit", "cpu_request", "memory_limit", "memory_request"}
    return {n for n in inputs_of(task) if not n.startswith("pipelinechannel--")} - of_the_pod


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


def test_the_run_parameters_are_the_leaves_of_the_configuration(spec):
    given = spec["root"]["inputDefinitions"]["parameters"]
    every = (*run_parameters(), *step_parameters())
    assert set(given) == {p.name for p in every}
    for parameter in every:
        assert given[parameter.name] == {
            "parameterType": KFP_TYPES[parameter.type],
            "defaultValue": parameter.default,
            "isOptional": True,
            "description": parameter.description,
            **({"literals": list(choices)} if (choices := choices_of(parameter)) else {}),
        }


def choices_of(parameter):
    return getattr(parameter, "choices", ())


def test_what_takes_one_of_a_list_is_a_drop_down_of_the_form(spec):
    given = spec["root"]["inputDefinitions"]["parameters"]
    drawn = {name: each["literals"] for name, each in given.items() if "literals" in each}
    assert drawn["training_schedule_name"] == ["constant", "cosine", "exponential", "piecewise"]
    assert drawn["gate_champion_better"] == ["", "higher", "lower"]
    # The server refuses every other value, the default included.
    assert all(given[name]["defaultValue"] in literals for name, literals in drawn.items())
    # What also takes a module of the user, and a list, stays free.
    assert not {"training_strategy", "model_name", "export_formats"} & set(drawn)
    # A step gets what the run was given; only the form and the API look at the list.
    assert "literals" not in json.dumps(spec["components"])


def test_a_number_of_the_pods_is_a_text():
    # Of anything else KFP makes an empty text, where it puts it into a pod.
    scalars = [p for p in step_parameters() if p.type not in {dict, list}]
    assert {p.type for p in scalars} == {str}


def test_the_pipeline_says_what_it_does(spec):
    assert spec["pipelineInfo"]["description"].startswith("Train a model that passes its gate")


def test_every_run_parameter_reaches_the_first_step(main_tasks):
    given = inputs_of(main_tasks["resolve-config"])
    for parameter in run_parameters():
        channel = given[parameter.name]["componentInputParameter"]
        assert channel.endswith(f"--{parameter.name}")
    assert given["kfp_run_id"]["runtimeValue"]["constant"] == "{{$.pipeline_job_uuid}}"


def test_the_exit_step_runs_after_everything(spec):
    tasks = spec["root"]["dag"]["tasks"]
    assert set(tasks) == {"exit-handler-1", "finish"}
    assert tasks["finish"]["dependentTasks"] == ["exit-handler-1"]
    assert tasks["finish"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    # Of the parameter and not of the first step, which may be the one that failed.
    assert inputs_of(tasks["finish"])["root"] == {"componentInputParameter": "storage_root"}
    for name in ("launcher", "kubernetes"):
        given = {"componentInputParameter": f"cluster_{name}"}
        assert inputs_of(tasks["finish"])[name] == given
    assert inputs_of(tasks["finish"])["status"]["taskFinalStatus"] == {
        "producerTask": "exit-handler-1"
    }


FROM_FIRST = "pipelinechannel--resolve-config-"


def test_each_step_gets_what_the_one_before_has_published(news, accepted):
    train, evaluate = accepted["train-model"], accepted["evaluate-model"]
    data = {"componentInputParameter": f"{FROM_FIRST}data"}
    assert inputs_of(news["prepare-data"])["data"] == data
    assert source_of(news["validate-data"], "dataset") == ("prepare-data", "Output")
    dataset = {"componentInputParameter": "pipelinechannel--prepare-data-Output"}
    assert inputs_of(train)["dataset"] == dataset
    assert inputs_of(evaluate)["dataset"] == dataset
    assert source_of(evaluate, "checkpoint") == ("train-model", "Output")
    assert source_of(accepted["check-gate"], "evaluation") == ("evaluate-model", "Output")


def artifacts_of(task):
    """Return which output of which step each input artifact of a task is."""
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
        "validate-data": {"dataset_descriptor": dataset},
        "train-model": {"dataset_descriptor": "dataset"},
        "evaluate-model": {"dataset_descriptor": "dataset", "checkpoint_descriptor": checkpoint},
        "check-gate": {"evaluation_descriptor": "evaluate-model/evaluation_metrics"},
        # They enter a group under the names that its graph shows.
        "condition-3": {"dataset": dataset},
        "condition-4": {
            "dataset": "dataset", "checkpoint": checkpoint, "decision": "check-gate/decision",
        },
        "export-model": {
            f"{name}_descriptor": name for name in ("dataset", "checkpoint", "decision")
        },
        "register-model": {"model_descriptor": "export-model/model"},
    }  # fmt: skip
    tasks = all_tasks(spec)
    assert {name: artifacts_of(tasks[name]) for name in expected} == expected
    for name in ("condition-3", "condition-4"):
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
        "resolve-config": {"configuration": "Artifact"},
        "prepare-data": {"dataset": "Dataset"},
        "validate-data": {"validation": "Artifact", "page": "HTML"},
        # The second name is KFP's: without it, its UI offers no TensorBoard.
        "train-model": {"checkpoint": "Model", "mlpipeline_ui_metadata": "Artifact"},
        "evaluate-model": {
            "evaluation_metrics": "Metrics",
            "confusion_matrix": "ClassificationMetrics",
            "roc_curve": "ClassificationMetrics",
        },
        "check-gate": {"decision": "Artifact"},
        "export-model": {"model": "Model"},
        "register-model": {"registration": "Model"},
        "finish": {"report": "HTML", "summary": "Markdown"},
    }


def test_a_step_needs_no_artifact(spec):
    # KFP cannot make one of the URI that a pipeline of others has.
    for component in spec["components"].values():
        if "executorLabel" in component:
            taken = component["inputDefinitions"].get("artifacts", {})
            assert all(each["isOptional"] for each in taken.values())


@pytest.mark.parametrize("step", ["train-model", "evaluate-model", "check-gate"])
def test_each_step_gets_the_run(news, accepted, step):
    for name in ("config", "root", "run_id"):
        given = {"componentInputParameter": f"{FROM_FIRST}{name}"}
        assert inputs_of(news["validate-data"])[name] == given
        assert inputs_of(accepted[step])[name] == given


def test_preparing_data_depends_on_nothing_but_the_data_section(news):
    assert own_inputs_of(news["prepare-data"]) == {"data", "root", "seal", "data_code"}


def test_the_image_and_the_secret_of_the_run_are_handed_on(spec, accepted):
    for task, names in (
        (accepted["train-model"], ("image", "store_secret")),
        (below(spec, "condition-4")["register-model"], ("image",)),
    ):
        for name in names:
            given = inputs_of(task)[name]["componentInputParameter"]
            assert given == f"pipelinechannel--{name}"


def test_where_nothing_is_new_no_step_runs_but_the_first_and_the_last(main_tasks, news):
    condition = main_tasks["condition-2"]["triggerPolicy"]["condition"]
    assert condition == f"inputs.parameter_values['{FROM_FIRST}Output'] == 'new'"
    assert set(main_tasks) == {"resolve-config", "condition-2"}
    assert set(news) == {"prepare-data", "validate-data", "condition-3"}


def test_only_accepted_data_is_trained_on(news, accepted):
    condition = news["condition-3"]["triggerPolicy"]["condition"]
    assert condition.endswith("== 'accepted'")
    assert "validate-data-Output" in condition
    assert set(accepted) == {"train-model", "evaluate-model", "check-gate", "condition-4"}


def test_only_a_blessed_model_is_exported(spec, accepted):
    branch = accepted["condition-4"]
    condition = branch["triggerPolicy"]["condition"]
    assert condition.endswith("== 'blessed'")
    assert "check-gate-Output" in condition
    steps = below(spec, "condition-4")
    assert set(steps) == {"export-model", "register-model"}
    decision = inputs_of(steps["export-model"])["decision"]["componentInputParameter"]
    assert decision.endswith("check-gate-decision_uri")


def test_only_what_the_table_says_may_come_from_a_cache(spec):
    tasks = all_tasks(spec)
    cached = [
        step.name for step in STEPS if tasks[step.kfp_name]["cachingOptions"].get("enableCache")
    ]
    assert cached == [step.name for step in STEPS if step.is_cached] == ["prepare_data"]


def test_every_row_of_the_table_is_wired_once(spec):
    wired = [
        task["componentRef"]["name"].removeprefix("comp-") for task in all_tasks(spec).values()
    ]
    groups = ("exit-handler", "condition")
    steps = [name for name in wired if not name.startswith(groups)]
    assert sorted(steps) == sorted(step.kfp_name for step in STEPS)


def test_kfp_calls_the_pipeline_by_position():
    kinds = {parameter.kind for parameter in SIGNATURE.parameters.values()}
    assert kinds == {next(iter(SIGNATURE.parameters.values())).POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("prepare", ["prepare-data", "resolve-config", "validate-data"]),
        ("train", ["condition-1", "prepare-data", "resolve-config", "validate-data"]),
        ("train_on", ["resolve-config", "train-model"]),
    ],
)
def test_the_short_pipelines(name, steps):
    tasks = PIPELINES[name].pipeline_spec.root.dag.tasks
    assert sorted(tasks) == steps


def test_training_on_a_dataset_takes_its_uri():
    spec = PIPELINES["train_on"].pipeline_spec
    given = spec.root.dag.tasks["train-model"].inputs.parameters["dataset"]
    assert given.component_input_parameter == "dataset"
    assert set(spec.root.input_definitions.parameters) == {*SIGNATURE.parameters, "dataset"}
