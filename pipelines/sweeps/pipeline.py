"""A sweep as a single pipeline on a KFP instance.

prepare_data -> run_trial (a loop with limited parallelism) -> choose_trial -> evaluate_model ->
export_model

A failed trial does not fail its step, so the loop continues. With halving, each rung has a loop and
a choice, and the trials of the next rung continue from their own checkpoints. A loop has a fixed
number of places for trials. If trials failed, the steps of unused places end immediately.
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
from flotilla.components.sweeps import choose_trial, finish_sweep, run_trial
from flotilla.pipelines.compile import write_pipeline
from flotilla.pipelines.step_settings import NO_SETTINGS, StepPods, check_image
from flotilla.pipelines.sweeps import SweepOptions, plan_sweep
from flotilla.pipelines.training import Wiring, make_signature, pipeline_on_cluster, promote
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
    """Write the pipeline of a sweep, and return the sweep. Raises `ConfigError` or `UserError`."""
    check_image(image)
    if options.tpe is not None or options.auto:
        raise ConfigError(
            f"{'--auto' if options.auto else '--tpe'} chooses each trial from the results of "
            "earlier trials, but a compiled pipeline has a fixed list of trials; use --random N "
            "with --compile"
        )
    if options.minutes is not None:
        raise ConfigError("--minutes applies only to sweeps on this machine; omit --minutes")
    sweep = plan_sweep(options)
    write_pipeline(output, sweep_pipeline(sweep, options.parallel, image or IMAGE, pods))
    return sweep


def sweep_pipeline(
    sweep: Sweep, parallel: int, image: str = IMAGE, pods: StepPods = NO_SETTINGS
) -> Any:
    """Return the pipeline of a sweep. The run parameters default to the sweep's configuration."""

    def sweeping(wiring: Wiring, text: Any) -> None:
        """Train the trials of a sweep; promote the best one if it passes the gate."""
        _sweeping(wiring, sweep, parallel, text)

    signature = make_signature(image, to_form(sweep.base))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    text = inspect.Parameter(PARAMETER, kind, default=_text(sweep), annotation=str)
    signature = signature.replace(parameters=[*signature.parameters.values(), text])
    return pipeline_on_cluster(sweeping, NAME, signature, pods)


def _text(sweep: Sweep) -> str:
    """Return the sweep as JSON, without its configuration, search space and run ids."""
    plain = replace(
        sweep,
        sweep_id=f"{sweep.base.name}-sweep",
        config={},
        space={},
        trials=tuple(replace(each, run_id="") for each in sweep.trials),
    )
    return json.dumps(tree_of(plain))


def _sweeping(wiring: Wiring, sweep: Sweep, parallel: int, text: Any) -> None:
    at_exit = wiring.add_exit_step(finish_sweep, sweep=text)
    # The trials are new, so do not skip the run if an earlier run used the same files.
    ready = wiring.ready(is_whole_run=False)
    with dsl.ExitHandler(at_exit, name="sweep"), ready as (run, dataset):
        chosen = _train_rungs(wiring, sweep, parallel, {**run, "sweep": text}, dataset)
        best = {**run, "config": chosen.outputs["config"]}
        promote(wiring, best, {**dataset, "checkpoint": chosen.outputs["checkpoint"]})


def _train_rungs(
    wiring: Wiring,
    sweep: Sweep,
    parallel: int,
    run: dict[str, Any],
    dataset: Mapping[str, Any],
) -> Any:
    """Add the steps of all rungs. Return the step that chooses the best trial.

    A loop runs over numbered places, and its steps read the surviving trials from the store. The
    trials cannot be inputs, because in a loop KFP's local runner replaces each output of earlier
    steps with the loop item.
    """
    chosen: Any = None
    for rung in range(len(sweep.rungs)):
        places = [str(place) for place in range(count_on_rung(rung, len(sweep.trials)))]
        with dsl.ParallelFor(items=places, name=f"rung-{rung}", parallelism=parallel) as place:
            inputs = {**run, **dataset, **wiring.pod_settings()}
            trial = wiring.step(run_trial, **inputs, place=place, rung=rung)
            if chosen is not None:
                trial.after(chosen)
        ended = dsl.Collected(trial.outputs["Output"])
        chosen = wiring.step(choose_trial, **run, ended=ended, rung=rung)
    return chosen
