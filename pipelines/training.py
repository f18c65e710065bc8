"""The pipeline: wiring only.

The run parameters are made from the configuration model, so that a key of the configuration can be
typed into the KFP UI without another line here.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kfp import dsl

from components.check_gate import check_gate
from components.evaluate_model import evaluate_model
from components.export_model import export_model
from components.finish import finish
from components.image import IMAGE
from components.prepare_data import prepare_data
from components.register_model import register_model
from components.resolve_config import resolve_config
from components.train_model import train_model
from pipelines import step_settings
from pipelines.step_settings import StepParameter, step_parameters
from trainer.config.run_parameters import Parameter, run_parameters

COMPONENTS = (
    resolve_config,
    prepare_data,
    train_model,
    evaluate_model,
    check_gate,
    export_model,
    register_model,
    finish,
)
Place = Callable[[Any, Mapping[str, Any]], None]


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
    """The steps of one pipeline, each set up for where it runs."""

    def __init__(self, place: Place, values: tuple[Any, ...]) -> None:
        """Take the values of the run parameters; `place` sets up a task by them."""
        self.asked = SIGNATURE.bind(*values).arguments
        self._place = place

    def resolved(self) -> Any:
        """Check the run parameters."""
        parameters = {p.name: self.asked[p.name] for p in run_parameters()}
        task = resolve_config(**parameters, kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
        return self.uncached(task).outputs

    def prepared(self, resolved: Any) -> Any:
        """Prepare the dataset, the only step that KFP may take from its cache."""
        inputs = {key: resolved[key] for key in ("data", "root", "seal")}
        return self._placed(prepare_data(**inputs)).outputs["Output"]

    def trained(self, run: dict[str, Any], dataset: Any) -> Any:
        """Train."""
        pods = {key: self.asked[key] for key in ("image", "store_secret")}
        return self.uncached(train_model(**run, dataset=dataset, **pods)).outputs["Output"]

    def uncached(self, task: Any) -> Any:
        """Set up a task that runs every time."""
        return self._placed(task).set_caching_options(False)

    def _placed(self, task: Any) -> Any:
        self._place(task, self.asked)
        return task


def run_of(resolved: Any) -> dict[str, Any]:
    """Return what every step after the first two gets."""
    return {key: resolved[key] for key in ("config", "root", "run_id")}


def training(place: Place, *values: Any) -> None:
    """Train a model that passes its gate: from a dataset by name to a promoted, exported model."""
    wiring = Wiring(place, values)
    asked = wiring.asked
    exit_step = finish(
        root=asked["storage_root"],
        launcher=asked["cluster_launcher"],
        kubernetes=asked["cluster_kubernetes"],
        kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
    )
    wiring.uncached(exit_step)
    with dsl.ExitHandler(exit_step, name="run"):
        resolved = wiring.resolved()
        run = run_of(resolved)
        dataset = wiring.prepared(resolved)
        checkpoint = wiring.trained(run, dataset)
        evaluated = wiring.uncached(evaluate_model(**run, dataset=dataset, checkpoint=checkpoint))
        gate = wiring.uncached(check_gate(**run, evaluation=evaluated.outputs["Output"]))
        with dsl.If(gate.outputs["Output"] == "blessed", name="blessed"):
            exported = wiring.uncached(
                export_model(
                    **run, dataset=dataset, checkpoint=checkpoint, decision=gate.outputs["decision"]
                )
            )
            wiring.uncached(
                register_model(**run, model=exported.outputs["Output"], image=asked["image"])
            )


def preparing(place: Place, *values: Any) -> None:
    """Prepare data, and no more."""
    wiring = Wiring(place, values)
    wiring.prepared(wiring.resolved())


def training_only(place: Place, *values: Any) -> None:
    """Prepare data and train."""
    wiring = Wiring(place, values)
    resolved = wiring.resolved()
    wiring.trained(run_of(resolved), wiring.prepared(resolved))


def training_on(place: Place, *values: Any) -> None:
    """Train on a dataset that is published already; its URI is the last value."""
    *parameters, dataset = values
    wiring = Wiring(place, tuple(parameters))
    wiring.trained(run_of(wiring.resolved()), dataset)


def _as_it_is(_task: Any, _asked: Mapping[str, Any]) -> None:
    """Leave a task as it is: a step on this machine is a process."""


def local_pipeline(wiring: Any, name: str, *more: inspect.Parameter) -> Any:
    """Return a pipeline for KFP's local runner; `more` are parameters after those of every run."""
    signature = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *more])
    return dsl.pipeline(_called(wiring, _as_it_is, signature), name=name)


def cluster_pipeline(image: str = IMAGE) -> Any:
    """Return the whole pipeline for a KFP instance; `image` is the default of its image."""
    function = _called(training, step_settings.apply, _signature(image))
    return dsl.pipeline(
        function,
        name="flotilla-training",
        description=inspect.getdoc(training),
        pipeline_config=step_settings.configuration(),
    )


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
