"""A sweep as one pipeline on a KFP instance.

    resolve_config -> prepare_data -> validate_data -> run_trial (a loop, so many at a time)
    -> choose_trial -> evaluate_model -> check_gate -> export_model -> register_model

The dataset is prepared once. A trial that fails is a result of its step, so that the loop goes on;
its steps return what became of them, and no artifact leaves the loop. With halving there is a loop
and a choice a rung, and the trials of the next rung continue from their own checkpoints.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kfp import dsl

from components.image import IMAGE
from components.sweeps.choose_trial import choose_trial
from components.sweeps.finish_sweep import finish_sweep
from components.sweeps.run_trial import run_trial
from components.table import StepSpec
from pipelines import step_settings
from pipelines.compile import write_pipeline
from pipelines.step_pods import NO_SETTINGS, StepPods
from pipelines.step_settings import check_image
from pipelines.sweeps.plan import SweepOptions, planned
from pipelines.training import SIGNATURE, Place, Wiring, promoted, run_of
from trainer.config.run_parameters import to_parameters
from trainer.json_records import tree_of
from trainer.sweeps.state import Sweep

NAME = "flotilla-sweep"
#: The run parameter with the trials, as JSON.
PARAMETER = "sweep"


def compile_sweep(
    options: SweepOptions, output: Path, image: str = "", pods: StepPods = NO_SETTINGS
) -> Sweep:
    """Write the pipeline of a sweep; return the sweep.

    Raises:
        ConfigError: the search space, or the name of the image, is wrong.
        UserError: the file cannot be written.
    """
    check_image(image)
    sweep = planned(options)
    write_pipeline(output, sweep_pipeline(sweep, options.parallel, image or IMAGE, pods))
    return sweep


def sweep_pipeline(
    sweep: Sweep,
    parallel: int,
    image: str = IMAGE,
    pods: StepPods = NO_SETTINGS,
) -> Any:
    """Return the pipeline of a sweep, with its configuration as the default of each parameter."""

    def place(task: Any, step: StepSpec, given: Mapping[str, Any]) -> None:
        step_settings.apply(task, step, given)
        pods.apply(task, step)

    def pipeline(*values: Any) -> None:
        _sweeping(place, sweep, parallel, values)

    values = {**to_parameters(sweep.base), "image": image}
    parameters = [
        each.replace(default=values.get(each.name, each.default))
        for each in SIGNATURE.parameters.values()
    ]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    text = inspect.Parameter(PARAMETER, kind, default=_text(sweep), annotation=str)
    pipeline.__signature__ = SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, text]
    )
    return dsl.pipeline(
        pipeline,
        name=NAME,
        description="Train the trials of a sweep; promote the best one where the gate lets it.",
        pipeline_config=step_settings.configuration(),
    )


def _text(sweep: Sweep) -> str:
    """Return the sweep without what the other run parameters say, and without its time."""
    plain = replace(
        sweep,
        sweep_id=f"{sweep.base.name}-sweep",
        config={},
        trials=tuple(replace(each, run_id="") for each in sweep.trials),
    )
    return json.dumps(tree_of(plain))


def _sweeping(place: Place, sweep: Sweep, parallel: int, values: tuple[Any, ...]) -> None:
    *parameters, text = values
    wiring = Wiring(place, tuple(parameters))
    given = wiring.given
    exit_step = wiring.step(
        finish_sweep,
        root=given["storage_root"],
        launcher=given["cluster_launcher"],
        kubernetes=given["cluster_kubernetes"],
        kfp_run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        sweep=text,
    )
    with dsl.ExitHandler(exit_step, name="sweep"):
        resolved = wiring.resolved()
        run, dataset = run_of(resolved), wiring.prepared(resolved)
        with wiring.validated(run, dataset):
            chosen = _trained(wiring, sweep, parallel, text, run, dataset)
            best = {**run, "config": chosen.outputs["config"]}
            promoted(wiring, best, {**dataset, "checkpoint": chosen.outputs["checkpoint"]})


def _trained(
    wiring: Wiring,
    sweep: Sweep,
    parallel: int,
    text: Any,
    run: dict[str, Any],
    dataset: Mapping[str, Any],
) -> Any:
    """Train all rungs; return the step that chose the best trial."""
    items: Any = [str(each.number) for each in sweep.trials]
    pods = {key: wiring.given[key] for key in ("image", "store_secret")}
    chosen: Any = None
    for rung in range(len(sweep.rungs)):
        with dsl.ParallelFor(items=items, name=f"rung-{rung}", parallelism=parallel) as number:
            trial = wiring.step(
                run_trial, **run, **dataset, **pods, sweep=text, number=number, rung=rung
            )
        ended = dsl.Collected(trial.outputs["Output"])
        chosen = wiring.step(choose_trial, **run, sweep=text, ended=ended, rung=rung)
        items = chosen.outputs["numbers"]
    return chosen
