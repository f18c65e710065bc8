"""A sweep as one pipeline on a KFP instance.

prepare_data -> run_trial (a loop, so many at a time) -> choose_trial -> evaluate_model ->
export_model
A trial that fails is a result of its step, so that the loop goes on. With halving there is a loop
and a choice a rung, and the trials of the next rung continue from their own checkpoints. A place on
a rung that no trial takes, since some failed, is a step that ends at once.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kfp import dsl

from flotilla.components.image import IMAGE
from flotilla.components.sweeps.choose_trial import choose_trial
from flotilla.components.sweeps.finish_sweep import finish_sweep
from flotilla.components.sweeps.run_trial import run_trial
from flotilla.pipelines.compile import write_pipeline
from flotilla.pipelines.step_settings import NO_SETTINGS, StepPods, check_image
from flotilla.pipelines.sweeps.plan import SweepOptions, plan_sweep
from flotilla.pipelines.training import Wiring, pipeline_on_cluster, promoted, signature_of
from flotilla.trainer.config.form import to_form
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.json_records import tree_of
from flotilla.trainer.sweeps.sweep import Sweep, count_on_rung

NAME = "flotilla-sweep"
#: The run parameter with the trials, as JSON.
PARAMETER = "sweep"


def compile_sweep(
    options: SweepOptions, output: Path, image: str = "", pods: StepPods = NO_SETTINGS
) -> Sweep:
    """Write the pipeline of a sweep; return it; raises `ConfigError` or `UserError`."""
    check_image(image)
    if options.tpe is not None:
        raise ConfigError(
            "--tpe chooses each trial by those before, and the loop of a pipeline has a fixed "
            "list: use --random N with --compile"
        )
    sweep = plan_sweep(options)
    write_pipeline(output, sweep_pipeline(sweep, options.parallel, image or IMAGE, pods))
    return sweep


def sweep_pipeline(
    sweep: Sweep, parallel: int, image: str = IMAGE, pods: StepPods = NO_SETTINGS
) -> Any:
    """Return the pipeline of a sweep, with its configuration as the default of each parameter."""

    def sweeping(wiring: Wiring, text: Any) -> None:
        """Train the trials of a sweep; promote the best one where the gate lets it."""
        _sweeping(wiring, sweep, parallel, text)

    signature = signature_of(image, to_form(sweep.base))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    text = inspect.Parameter(PARAMETER, kind, default=_text(sweep), annotation=str)
    signature = signature.replace(parameters=[*signature.parameters.values(), text])
    return pipeline_on_cluster(sweeping, NAME, signature, pods)


def _text(sweep: Sweep) -> str:
    """Return the sweep without what the other run parameters say, and without its time."""
    plain = replace(
        sweep,
        sweep_id=f"{sweep.base.name}-sweep",
        config={},
        space={},
        trials=tuple(replace(each, run_id="") for each in sweep.trials),
    )
    return json.dumps(tree_of(plain))


def _sweeping(wiring: Wiring, sweep: Sweep, parallel: int, text: Any) -> None:
    at_exit = wiring.at_exit(finish_sweep, sweep=text)
    # The trials are new, whatever a run on the same files has done.
    ready = wiring.ready(is_whole_run=False)
    with dsl.ExitHandler(at_exit, name="sweep"), ready as (run, dataset):
        chosen = _trained(wiring, sweep, parallel, {**run, "sweep": text}, dataset)
        best = {**run, "config": chosen.outputs["config"]}
        promoted(wiring, best, {**dataset, "checkpoint": chosen.outputs["checkpoint"]})


def _trained(
    wiring: Wiring,
    sweep: Sweep,
    parallel: int,
    run: dict[str, Any],
    dataset: Mapping[str, Any],
) -> Any:
    """Train all rungs; return the step that chose the best trial.

    A loop is over places, and what is chosen comes by the store: KFP's local runner gives a loop in
    place of every output of the steps before it the item of the loop.
    """
    chosen: Any = None
    for rung in range(len(sweep.rungs)):
        places = [str(place) for place in range(count_on_rung(rung, len(sweep.trials)))]
        with dsl.ParallelFor(items=places, name=f"rung-{rung}", parallelism=parallel) as place:
            inputs = {**run, **dataset, **wiring.of_pods()}
            trial = wiring.step(run_trial, **inputs, place=place, rung=rung)
            if chosen is not None:
                trial.after(chosen)
        ended = dsl.Collected(trial.outputs["Output"])
        chosen = wiring.step(choose_trial, **run, ended=ended, rung=rung)
    return chosen
