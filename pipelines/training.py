"""The wiring of the pipeline. The properties of each step are in `flotilla.components.table`.

The run parameters are the image and the fields of the form; see `flotilla.trainer.config.form`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kfp import dsl

from flotilla.components.evaluate_model import evaluate_model
from flotilla.components.export_model import export_model
from flotilla.components.finish import finish
from flotilla.components.image import IMAGE
from flotilla.components.prepare_data import prepare_data
from flotilla.components.table import READY, STEPS, Output, StepSpec, find_maker, find_step
from flotilla.components.train_model import train_model
from flotilla.pipelines.step_settings import NO_SETTINGS, StepPods, configuration
from flotilla.trainer.config.form import FIELDS, SETTINGS, Field, to_form
from flotilla.trainer.config.schema import Config

Place = Callable[[Any, StepSpec, Mapping[str, Any]], None]
#: The run parameter for the image, which is not a configuration key.
IMAGE_FIELD = Field(
    name="image", key=(), type=str, description="container image of all steps and training tasks"
)
# The form lists the image just before this field.
_BEFORE = "storage_root"


def load_component(step: StepSpec) -> Any:
    """Return the KFP component of a step in the table."""
    return getattr(import_module(f"flotilla.components.{step.name}"), step.name)


COMPONENTS = tuple(map(load_component, STEPS))


def _fields() -> Iterator[Field]:
    for field in FIELDS:
        if field.name == _BEFORE:
            yield IMAGE_FIELD
        yield field


def make_signature(
    image: str = IMAGE, defaults: Mapping[str, Any] | None = None
) -> inspect.Signature:
    """Return the run parameters. `defaults` are field values as returned by `to_form`."""
    given = {**{each.name: each.default for each in FIELDS}, "image": image, **(defaults or {})}
    return inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=given[each.name],
                annotation=each.type,
            )
            for each in _fields()
        ]
    )


SIGNATURE = make_signature()


class Wiring:
    """The steps of one pipeline, each configured for the place where it runs."""

    def __init__(self, place: Place, values: tuple[Any, ...], secret: str = "") -> None:
        """Store the values of the run parameters. `place` configures each task with them.

        `secret` names the secret with the keys of the object store, for the training job.
        """
        self.given = SIGNATURE.bind(*values).arguments
        self._place, self._secret = place, secret

    def step(self, component: Any, **inputs: Any) -> Any:
        """Add the step of a component.

        Raises `LookupError` if the component is not in the table.
        """
        row = find_step(component.name)
        task = component(**inputs)
        self._place(task, row, self.given)
        # Disable KFP's cache, because the result of a step depends on more than its inputs.
        # Flotilla caches datasets under its own key.
        task.set_caching_options(False)
        return task

    def prepare(self, **more: Any) -> Any:
        """Add the step that prepares the dataset, and return its task."""
        given = {each.name: self.given[each.name] for each in FIELDS}
        run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        return self.step(prepare_data, **given, kfp_run_id=run_id, **more)

    @contextmanager
    def ready(self, **more: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Prepare the dataset. The steps of the `with` block run only if the dataset is ready.

        Yield the common inputs of these steps, and the inputs that name the dataset.
        """
        prepared = self.prepare(**more)
        with dsl.If(prepared.outputs["Output"] == READY, name=READY):
            yield common_inputs(prepared), flows(prepared, "dataset", uri="dataset_uri")

    def train(self, run: dict[str, Any], dataset: Mapping[str, Any]) -> dict[str, Any]:
        """Add the training step. Return its final checkpoint as inputs of the next steps."""
        return flows(self.step(train_model, **run, **dataset, **self.pod_settings()), "checkpoint")

    def pod_settings(self) -> dict[str, Any]:
        """Return the image and the secret for the pods of a training job."""
        return {"image": self.given["image"], "store_secret": self._secret}

    def add_exit_step(self, component: Any, **more: Any) -> Any:
        """Add the exit step, which always runs last, with the inputs that it needs to end jobs."""
        return self.step(
            component,
            root=self.given["storage_root"],
            settings=self.given[SETTINGS],
            kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            **more,
        )


def common_inputs(prepared: Any) -> dict[str, Any]:
    """Return the inputs that all steps after the first one have in common."""
    return {key: prepared.outputs[key] for key in ("config", "root", "run_id")}


def flows(task: Any, output: Output, *, uri: str = "Output") -> dict[str, Any]:
    """Return the inputs that pass a step's output to other steps: its URI and its descriptor."""
    made = {output: uri, f"{output}_descriptor": output}
    return {name: task.outputs[key] for name, key in made.items()}


def training(wiring: Wiring) -> None:
    """Train a model, and promote it if it passes the gate."""
    with (
        dsl.ExitHandler(wiring.add_exit_step(finish), name="run"),
        wiring.ready() as (run, dataset),
    ):
        promote(wiring, run, {**dataset, **wiring.train(run, dataset)})


def promote(wiring: Wiring, run: dict[str, Any], made: Mapping[str, Any]) -> None:
    """Evaluate a checkpoint, then export and register it if it passes the gate."""
    gate = wiring.step(evaluate_model, **run, **made)
    blessed = find_maker("decision").accepts
    with dsl.If(gate.outputs["Output"] == blessed, name=blessed):
        decision = flows(gate, "decision", uri="decision_uri")
        wiring.step(export_model, **run, **made, **decision, image=wiring.given["image"])


def preparing(wiring: Wiring) -> None:
    """Prepare data and check it."""
    wiring.prepare(is_whole_run=False)


def training_only(wiring: Wiring) -> None:
    """Prepare data, check it and train."""
    with wiring.ready(is_whole_run=False) as (run, dataset):
        wiring.train(run, dataset)


def training_on(wiring: Wiring, dataset: Any) -> None:
    """Train on a published dataset."""
    prepared = wiring.prepare(published=dataset, is_whole_run=False)
    wiring.train(common_inputs(prepared), {"dataset": prepared.outputs["dataset_uri"]})


def local_pipeline(wire: Any, name: str, *more: inspect.Parameter) -> Any:
    """Return a pipeline for KFP's local runner. `more` are additional parameters."""
    signature = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *more])
    # Leave the tasks unchanged, because a local step has no pod.
    return dsl.pipeline(_call_wiring(wire, lambda *_: None, signature), name=name)


def cluster_pipeline(
    image: str = IMAGE, pods: StepPods = NO_SETTINGS, config: Config | None = None
) -> Any:
    """Return the whole pipeline for a KFP instance.

    `image` and the values of `config` become the defaults of its run parameters.
    """
    signature = make_signature(image, to_form(config) if config else {})
    return pipeline_on_cluster(training, "flotilla-training", signature, pods)


def pipeline_on_cluster(
    wire: Any, name: str, signature: inspect.Signature, pods: StepPods = NO_SETTINGS
) -> Any:
    """Return a pipeline for a KFP instance with the run parameters of `signature`."""
    pipeline = dsl.pipeline(
        _call_wiring(wire, pods.apply, signature, pods.store_secret),
        name=name,
        description=inspect.getdoc(wire),
        pipeline_config=configuration(),
    )
    _offer_choices(pipeline.pipeline_spec)
    _name_artifacts(pipeline.pipeline_spec, pipeline.pipeline_spec.root.dag)
    return pipeline


def _offer_choices(spec: Any) -> None:
    """Add the allowed values of each run parameter, so that the KFP form shows a drop-down list."""
    declared = spec.root.input_definitions.parameters
    for field in FIELDS:
        for choice in field.choices:
            declared[field.name].literals.add().string_value = choice


def _name_artifacts(spec: Any, dag: Any) -> None:
    """Name the inputs of step groups in KFP's graph after the outputs that they come from."""
    for task in dag.tasks.values():
        group = spec.components[task.component_ref.name]
        if not group.dag.tasks:
            continue
        taken = task.inputs.artifacts
        for channel in list(taken):
            given = taken[channel]
            # A nested group gets its input from the outer group's input, not from a task's output.
            name = given.task_output_artifact.output_artifact_key or given.component_input_artifact
            for artifacts in (taken, group.input_definitions.artifacts):
                artifacts[name].CopyFrom(artifacts.pop(channel))
            for inner in group.dag.tasks.values():
                for each in inner.inputs.artifacts.values():
                    if each.component_input_artifact == channel:
                        each.component_input_artifact = name
        _name_artifacts(spec, group.dag)


def _call_wiring(wire: Any, place: Place, signature: inspect.Signature, secret: str = "") -> Any:
    def pipeline(*values: Any) -> None:
        count = len(SIGNATURE.parameters)
        wire(Wiring(place, values[:count], secret), *values[count:])

    # KFP reads the parameters from the signature, and their descriptions from the docstring.
    pipeline.__signature__ = signature  # type: ignore[attr-defined]
    described = (f"    {each.name}: {each.description}" for each in _fields())
    pipeline.__doc__ = "\n".join([f"{inspect.getdoc(wire)}\n\nArgs:", *described])
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
