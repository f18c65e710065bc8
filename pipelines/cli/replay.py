"""`flotilla replay`: a step of a run again on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.exit import Answer, answers, note
from pipelines.cli.options import Assignments, Run, Workdir, of_instance
from pipelines.cli.run import RUNS
from pipelines.runs.kfp_access import Instance
from trainer.errors import FAILED

if TYPE_CHECKING:
    from trainer.events import StepResult

_KILLED = "the process of the step was killed"


@answers
@of_instance
def replay(
    instance: Instance,
    run: Run,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Such as train_model.")],
    assignments: Assignments = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Open a debugger at the line that fails.")
    ] = False,
    workdir: Workdir = RUNS,
) -> Answer:
    """Run a step of a run again on this machine, with what it had; change nothing of the run.

    A run of a cluster is found by --set storage.root=URI, or by --endpoint.
    """
    from pipelines.replay.recorded import find
    from pipelines.replay.replay import replay as replayed

    recorded = find(run, step, settings=assignments or (), workdir=workdir, instance=instance)
    result = replayed(recorded, workdir, debug=pdb, on_line=lambda line: note(f"flotilla: {line}"))
    before, now, folder = recorded.record, result.replayed, str(result.folder)
    note(f"flotilla: {before.step} on record: {_in_words(before)}")
    note(f"flotilla: {before.step} here: {_in_words(now)}")
    note(f"flotilla: what it wrote is in {folder}; remove it when you are done")
    return Answer(
        status=now.status if now else "failed",
        code=now.exit_code if now else FAILED,
        run_id=recorded.run_id,
        metrics=dict(now.metrics) if now else {},
        message=now.error if now else _KILLED,
        more={
            "step": before.step,
            "recorded": {each: getattr(before, each) for each in ("status", "error", "metrics")},
            "folder": folder,
            "remarks": list(result.remarks),
        },
    )


def _in_words(result: StepResult | None) -> str:
    if result is None:
        return _KILLED
    found = [result.error] if result.error else result.metrics.get("reasons")
    plain = {name: each for name, each in result.metrics.items() if isinstance(each, str | float)}
    words = found or [f"{name} {each}" for name, each in plain.items()]
    return ": ".join(filter(None, [result.status, "; ".join(map(str, words))]))
