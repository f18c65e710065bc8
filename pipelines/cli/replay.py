"""`flotilla replay`: a step of a run again on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.exit import Answer, answers, note
from pipelines.cli.options import Assignments, Run, Workdir, of_instance
from pipelines.cli.run import RUNS
from pipelines.runs.kfp_access import Instance
from trainer.errors import DONE, FAILED


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
    """Run a step of a run again on this machine, with what it had; publish nothing.

    A run of a cluster is found by --set storage.root=URI, or by --endpoint.
    """
    from pipelines.replay import execution

    options = execution.ReplayOptions(
        run=run,
        step=step,
        settings=tuple(assignments or ()),
        workdir=workdir,
        instance=instance,
        debug=pdb,
    )
    result = execution.replay(options, lambda line: note(f"flotilla: {line}"))
    verdict, replayed = result.verdict, result.replayed
    note(f"flotilla: {result.recorded.step}: {verdict.words}")
    note(f"flotilla: what it wrote is in {result.folder}; remove it when you are done")
    return Answer(
        status="same" if verdict.same else "different",
        code=DONE if verdict.same else FAILED,
        run_id=result.recorded.run_id,
        metrics=execution.metrics_of(result),
        message=replayed.error if replayed else "the process of the step was killed",
        more={
            "step": result.recorded.step,
            "comparison": verdict.words,
            "differs": {name: list(pair) for name, pair in verdict.differs.items()},
            "fetched_bytes": result.fetched,
            "folder": str(result.folder),
            "remarks": list(result.remarks),
        },
    )
