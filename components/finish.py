"""The exit step, which ends the training job and writes the report.

It runs whether the run succeeded, was refused or failed.
"""

import logging
from contextlib import suppress
from pathlib import Path

from kfp import dsl

from flotilla.components import launchers
from flotilla.components.image import component
from flotilla.components.records import gather_report
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import (
    find_root,
    find_run_id,
    folder_of_run,
    is_local_run,
)
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)


@component
def finish(
    status: dsl.PipelineTaskFinalStatus,
    root: str,
    settings: dict,  # type: ignore[type-arg]
    kfp_run_id: str,
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """End the training cluster if it still exists, and write the report of the run."""
    from flotilla.components.finish import work
    from flotilla.components.records.record import run

    run(work, locals())


def work(step: Step) -> None:
    """Run the only stage of the step."""
    step.stage("finish", end_and_report)


def end_and_report(step: Step) -> None:
    """End the training cluster if it still exists. If that fails, write the report anyway."""
    found = step.root
    # If there is no root, the first step has failed and has already reported the reason.
    with suppress(UserError):
        found = find_root(step.root, step.report.uri, step.kfp_run_id)
    try:
        launchers.end(step.settings, find_run_id(step.kfp_run_id))
    finally:
        with folder_of_run() as folder:
            _report(step, found, folder)


def _report(step: Step, root: str, folder: Path) -> None:
    page, words = folder / gather_report.PAGE, step.status.error_message or ""
    run_id = find_run_id(step.kfp_run_id)
    uri = storage.join(root, run_id, page.name) if root else ""
    facts = gather_report.write(step.status.state, root, run_id, folder, page, words)
    artifacts = {"report": step.report, "summary": step.summary}
    for name, content in gather_report.render_artifacts(facts, page, uri).items():
        Path(artifacts[name].path).write_bytes(content)
    step.output.displays = {name: each.uri for name, each in artifacts.items()}
    # On a cluster, the warning must name the artifact, because the page is in a temporary folder.
    stays = page if is_local_run() else step.report.path
    if root and _publish(uri, page.read_bytes(), stays):
        step.output.done(uri, {})


def _publish(uri: str, page: bytes, stays: Path | str) -> bool:
    """Publish the report, and return whether this succeeded. A failure does not fail the run."""
    try:
        storage.write_bytes(uri, page)
    except storage.Unavailable as error:
        log.warning("the report could not be published and remains at %s: %s", stays, error)
        return False
    return True
