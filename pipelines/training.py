"""The pipeline: wiring only.

The run parameters are made from the configuration model, so that a key of the configuration can be
typed into the KFP UI without another line here.
"""

import inspect
from typing import Any

from kfp import dsl

from components.check_gate import check_gate
from components.evaluate_model import evaluate_model
from components.export_model import export_model
from components.finish import finish
from components.prepare_data import prepare_data
from components.register_model import register_model
from components.resolve_config import resolve_config
from components.train_model import train_model
from trainer.parameters import run_parameters

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
SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(
            p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=p.default, annotation=p.type
        )
        for p in run_parameters()
    ]
)


def _resolved(values: tuple[Any, ...]) -> Any:
    parameters = SIGNATURE.bind(*values).arguments
    task = resolve_config(**parameters, kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    return _uncached(task).outputs


def _uncached(task: Any) -> Any:
    return task.set_caching_options(False)


def _prepared(resolved: Any) -> Any:
    return prepare_data(data=resolved["data"], root=resolved["root"]).outputs["Output"]


def _trained(run: dict[str, Any], dataset: Any) -> Any:
    return _uncached(train_model(**run, dataset=dataset)).outputs["Output"]


def _run(resolved: Any) -> dict[str, Any]:
    return {key: resolved[key] for key in ("config", "root", "run_id")}


def training(*values: Any) -> None:
    """Prepare data, train, evaluate, and export and register what the gate blesses."""
    asked = SIGNATURE.bind(*values).arguments
    exit_step = finish(
        root=asked["storage_root"],
        launcher=asked["cluster_launcher"],
        kubernetes=asked["cluster_kubernetes"],
        kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
    )
    _uncached(exit_step)
    with dsl.ExitHandler(exit_step, name="run"):
        resolved = _resolved(values)
        run = _run(resolved)
        dataset = _prepared(resolved)
        checkpoint = _trained(run, dataset)
        evaluated = _uncached(evaluate_model(**run, dataset=dataset, checkpoint=checkpoint))
        gate = _uncached(check_gate(**run, evaluation=evaluated.outputs["Output"]))
        with dsl.If(gate.outputs["Output"] == "blessed", name="blessed"):
            exported = _uncached(
                export_model(
                    **run, dataset=dataset, checkpoint=checkpoint, decision=gate.outputs["decision"]
                )
            )
            _uncached(register_model(**run, model=exported.outputs["Output"]))


def preparing(*values: Any) -> None:
    """Prepare data, and no more."""
    _prepared(_resolved(values))


def training_only(*values: Any) -> None:
    """Prepare data and train."""
    resolved = _resolved(values)
    _trained(_run(resolved), _prepared(resolved))


def training_on(*values: Any) -> None:
    """Train on a dataset that is published already; its URI is the last value."""
    *parameters, dataset = values
    _trained(_run(_resolved(tuple(parameters))), dataset)


def _pipeline(wiring: Any, name: str, *more: inspect.Parameter) -> Any:
    wiring.__signature__ = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *more])
    return dsl.pipeline(wiring, name=name)


_DATASET = inspect.Parameter(
    "dataset", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=str
)

PIPELINES = {
    "run": _pipeline(training, "flotilla-training"),
    "prepare": _pipeline(preparing, "flotilla-prepare"),
    "train": _pipeline(training_only, "flotilla-train"),
    "train_on": _pipeline(training_on, "flotilla-train-on", _DATASET),
}
