"""The exit step: runs after success, refusal and failure alike; ends the job and reports."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from kfp import dsl

from components import launchers
from components.image import component
from components.locations import folder_of_run, root_of, run_at_first, run_id_of
from components.records import gather_report
from components.records.record import StepOutput, tried
from trainer import storage
from trainer.errors import UserError

log = logging.getLogger(__name__)


@component
def finish(
    status: dsl.PipelineTaskFinalStatus,
    root: str,
    launcher: str,
    kubernetes: str,
    kfp_run_id: str,
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """End what is left of the training cluster; write the report of what the run has published."""
    from components.finish import run_step

    run_step(status, root, launcher, kubernetes, kfp_run_id, report, summary)


def run_step(
    status: Any,
    root: str,
    launcher: str,
    kubernetes: str,
    kfp_run_id: str,
    report: Any,
    summary: Any,
) -> None:
    """End what is left of the training cluster and report.

    The report is written whether the job could be ended or not.

    Args:
        status: KFP's final status of the run.
        root: `storage.root`, as the run parameter has it.
        launcher: `cluster.launcher`, likewise.
        kubernetes: `cluster.kubernetes`, likewise.
        kfp_run_id: KFP's id of the run.
        report: a KFP HTML artifact.
        summary: a KFP Markdown artifact.
    """
    call = dict(locals())

    def work(record: StepOutput) -> None:
        run_id, folder, found = run_id_of(kfp_run_id), folder_of_run(), root
        # Without a root the first step has failed, and its own error says so.
        with suppress(UserError):
            found = root_of(root, report.uri, kfp_run_id)
        try:
            launchers.end(launcher, kubernetes, run_id)
        finally:
            page, words = folder / gather_report.PAGE, status.error_message or ""
            uri = storage.join(found, run_id, page.name) if found else ""
            facts = gather_report.write(status.state, found, run_id, folder, page, words)
            artifacts = {"report": report, "summary": summary}
            for name, content in gather_report.displayed(facts, page, uri).items():
                Path(artifacts[name].path).write_bytes(content)
            record.displays = {name: each.uri for name, each in artifacts.items()}
            if found and _published(uri, page):
                record.done(uri, {})

    tried("finish", run_at_first(root, report.uri, kfp_run_id), work, call=call)


def _published(uri: str, page: Path) -> bool:
    """Publish the report; a store that is out for too long fails no run that is done."""
    try:
        storage.write_bytes(uri, page.read_bytes())
    except storage.Unavailable as error:
        log.warning("the report is not published, and stays at %s: %s", page, error)
        return False
    return True
