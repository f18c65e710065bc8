"""The pipeline: wiring only; `components.table` has the properties of each step.

The run parameters are generated from the configuration model.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kfp import dsl

from components.check_gate import check_gate
from components.evaluate_model import evaluate_model
from components.export_model import export_model
from components.finish import finish
from components.image import IMAGE
from components.pod_parameters import StepParameter, step_parameters
from components.prepare_data import prepare_data
from components.register_model import register_model
from components.resolve_config import resolve_config
from components.table import NEW, STEPS, Output, StepSpec, maker_of, step_of
from components.train_model import train_model
from components.validate_data import validate_data
from pipelines import step_settings
from pipelines.step_settings import NO_SETTINGS, StepPods
from trainer.config.run_parameters import Parameter, run_parameters

Place = Callable[[Any, StepSpec, Mapping[str, Any]], None]


def component_of(step: StepSpec) -> Any:
    """Return the KFP component of a row of the table."""
    return getattr(import_module(f"components.{step.name}"), step.name)


COMPONENTS = tuple(map(component_of, STEPS))


def _parameters(image: str = IMAGE) -> tuple[Parameter | StepParameter, ...]:
    return (*run_parameters(), *step_parameters(image))


def _signature(image: str) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                p.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=p.default,
                annotation=p.type,
            )
            for p in _parameters(image)
        ]
    )


SIGNATURE = _signature(IMAGE)


class Wiring:
    """The steps of one pipeline, each set up for the place where it runs."""

    def __init__(self, place: Place, values: tuple[Any, ...]) -> None:
        """Take the values of the run parameters; `place` sets up a task by them."""
        self.given = SIGNATURE.bind(*values).arguments
        self._place = place

    def step(self, component: Any, **inputs: Any) -> Any:
        """Add a step as its row of the table says; raises `LookupError` where it has none."""
        row = step_of(component.name)
        task = component(**inputs)
        self._place(task, row, self.given)
        if not row.is_cached:
            task.set_caching_options(False)
        return task

    def resolved(self) -> Any:
        """Check the run parameters; return the outputs of that step."""
        names = [p.name for p in run_parameters()]
        names += [p.name for p in step_parameters() if p.fails_driver]
        parameters = {name: self.given[name] for name in names}
        run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        return self.step(resolve_config, **parameters, kfp_run_id=run_id).outputs

    def prepared(self, resolved: Any) -> dict[str, Any]:
        """Prepare the dataset; return it as the inputs of the next steps."""
        inputs = {key: resolved[key] for key in ("data", "root", "seal", "data_code")}
        return flows(self.step(prepare_data, **inputs), "dataset")

    def changed(self, resolved: Any) -> Any:
        """Return the condition of all steps that an earlier run has not done."""
        return dsl.If(resolved["Output"] == NEW, name=NEW)

    def validated(self, run: dict[str, Any], dataset: Mapping[str, Any]) -> Any:
        """Check the dataset; return the condition of the steps that train on it."""
        word = self.step(validate_data, **run, **dataset).outputs["Output"]
        return dsl.If(word == maker_of("validation").accepts, name=maker_of("validation").accepts)

    def trained(self, run: dict[str, Any], dataset: Mapping[str, Any]) -> dict[str, Any]:
        """Train; return the final checkpoint as the inputs of the next steps."""
        return flows(self.step(train_model, **run, **dataset, **self.of_pods()), "checkpoint")

    def of_pods(self) -> dict[str, Any]:
        """Return what the pods of a training job get of the run."""
        return {key: self.given[key] for key in ("image", "store_secret")}

    def at_exit(self, component: Any, **more: Any) -> Any:
        """Add the step that runs at the end whatever happened, with what ends the jobs."""
        return self.step(
            component,
            root=self.given["storage_root"],
            launcher=self.given["cluster_launcher"],
            kubernetes=self.given["cluster_kubernetes"],
            kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            **more,
        )


def run_of(resolved: Any) -> dict[str, Any]:
    """Return what every step after the first two takes."""
    return {key: resolved[key] for key in ("config", "root", "run_id")}


def flows(task: Any, output: Output, *, artifact: str = "", uri: str = "Output") -> dict[str, Any]:
    """Return what a step publishes as inputs of others: its URI, and its descriptor next to it."""
    made = {output: uri, f"{output}_descriptor": artifact or output}
    return {name: task.outputs[key] for name, key in made.items()}


def training(place: Place, *values: Any) -> None:
    """Train a model that passes its gate: from a dataset by name to a promoted, exported model."""
    wiring = Wiring(place, values)
    with dsl.ExitHandler(wiring.at_exit(finish), name="run"):
        resolved = wiring.resolved()
        with wiring.changed(resolved):
            _trained_on_news(wiring, resolved)


def _trained_on_news(wiring: Wiring, resolved: Any) -> None:
    run, dataset = run_of(resolved), wiring.prepared(resolved)
    with wiring.validated(run, dataset):
        promoted(wiring, run, {**dataset, **wiring.trained(run, dataset)})


def promoted(wiring: Wiring, run: dict[str, Any], made: Mapping[str, Any]) -> None:
    """Evaluate a checkpoint; export and register it where the gate lets it pass."""
    evaluated = wiring.step(evaluate_model, **run, **made)
    evaluation = flows(evaluated, "evaluation", artifact="evaluation_metrics")
    gate = wiring.step(check_gate, **run, **evaluation)
    decision = flows(gate, "decision", uri="decision_uri")
    with dsl.If(gate.outputs["Output"] == maker_of("decision").accepts, name="blessed"):
        model = flows(wiring.step(export_model, **run, **made, **decision), "model")
        wiring.step(register_model, **run, **model, image=wiring.given["image"])


def preparing(place: Place, *values: Any) -> None:
    """Prepare data and check it."""
    wiring = Wiring(place, values)
    resolved = wiring.resolved()
    wiring.step(validate_data, **run_of(resolved), **wiring.prepared(resolved))


def training_only(place: Place, *values: Any) -> None:
    """Prepare data, check it and train."""
    wiring = Wiring(place, values)
    resolved = wiring.resolved()
    run, dataset = run_of(resolved), wiring.prepared(resolved)
    with wiring.validated(run, dataset):
        wiring.trained(run, dataset)


def training_on(place: Place, *values: Any) -> None:
    """Train on a published dataset, whose URI is the last value."""
    *parameters, dataset = values
    wiring = Wiring(place, tuple(parameters))
    wiring.trained(run_of(wiring.resolved()), {"dataset": dataset})


def _on_this_machine(_task: Any, _row: StepSpec, _given: Mapping[str, Any]) -> None:
    """Leave a task as it is: a step on this machine is a process."""


def local_pipeline(wiring: Any, name: str, *more: inspect.Parameter) -> Any:
    """Return a pipeline for KFP's local runner; `more` are its further parameters."""
    signature = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *more])
    return dsl.pipeline(_called(wiring, _on_this_machine, signature), name=name)


def cluster_pipeline(image: str = IMAGE, pods: StepPods = NO_SETTINGS) -> Any:
    """Return the whole pipeline for a KFP instance; `image` is the default of its image."""
    return pipeline_on_cluster(training, "flotilla-training", _signature(image), pods)


def pipeline_on_cluster(
    wiring: Any, name: str, signature: inspect.Signature, pods: StepPods = NO_SETTINGS
) -> Any:
    """Return a pipeline for a KFP instance, whose run parameters are those of `signature`."""

    def place(task: Any, step: StepSpec, given: Mapping[str, Any]) -> None:
        step_settings.apply(task, step, given)
        pods.apply(task, step)

    pipeline = dsl.pipeline(
        _called(wiring, place, signature),
        name=name,
        description=inspect.getdoc(wiring),
        pipeline_config=step_settings.configuration(),
    )
    _offer_choices(pipeline.pipeline_spec)
    _name_artifacts(pipeline.pipeline_spec)
    return pipeline


def _offer_choices(spec: Any) -> None:
    """Add the values that a run parameter may have: the KFP form draws a drop-down of them."""
    declared = spec.root.input_definitions.parameters
    for parameter in run_parameters():
        for choice in parameter.choices:
            declared[parameter.name].literals.add().string_value = choice


def _name_artifacts(spec: Any) -> None:
    """Give what enters a group of steps the name of the output that it is, for the graph."""
    _name_below(spec, spec.root.dag)


def _name_below(spec: Any, dag: Any) -> None:
    for task in dag.tasks.values():
        group = spec.components[task.component_ref.name]
        if not group.dag.tasks:
            continue
        taken = task.inputs.artifacts
        for channel in list(taken):
            given = taken[channel]
            # Into a group within a group it comes under the name that it has above.
            name = given.task_output_artifact.output_artifact_key or given.component_input_artifact
            for artifacts in (taken, group.input_definitions.artifacts):
                artifacts[name].CopyFrom(artifacts.pop(channel))
            for inner in group.dag.tasks.values():
                for each in inner.inputs.artifacts.values():
                    if each.component_input_artifact == channel:
                        each.component_input_artifact = name
        _name_below(spec, group.dag)


def _called(wiring: Any, place: Place, signature: inspect.Signature) -> Any:
    def pipeline(*values: Any) -> None:
        wiring(place, *values)

    # KFP reads the parameters from the signature, and their descriptions from the docstring.
    pipeline.__signature__ = signature  # type: ignore[attr-defined]
    described = (f"    {p.name}: {p.description}" for p in _parameters())
    pipeline.__doc__ = "\n".join([f"{inspect.getdoc(wiring)}\n\nArgs:", *described])
    return pipeline


DATASET = inspect.Parameter(
    "dataset", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=str
)

PIPELINES = {
    "run": local_pipeline(training, "flotilla-training"),
    "prepare": local_pipeline(preparing, "flotilla-prepare"),
    "train": local_pipeline(training_only, "flotilla-train"),
    "train_on": local_pipeline(training_on, "flotilla-train-on", DATASET),
}
