"""The exit step: runs after success, refusal and failure alike; ends the job and reports."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from kfp import dsl

from components import gather_report, launchers
from components.image import component
from components.locations import folder_of_run, root_of, run_at_first, run_id_of
from components.record import recorded
from trainer import storage
from trainer.errors import UserError
from trainer.report import summary as run_summary


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
    at = run_at_first(root, report.uri, kfp_run_id)
    with recorded("finish", at) as record:
        run_id, folder = run_id_of(kfp_run_id), folder_of_run()
        # Without a root the first step has failed, and its own error says so.
        with suppress(UserError):
            root = root_of(root, report.uri, kfp_run_id)
        try:
            launchers.end(launcher, kubernetes, run_id)
        finally:
            page, words = folder / "report.html", status.error_message or ""
            uri = storage.join(root, run_id, page.name) if root else ""
            facts = gather_report.write(status.state, root, run_id, folder, page, words)
            Path(report.path).write_bytes(page.read_bytes())
            Path(summary.path).write_bytes(run_summary.as_markdown(facts, uri))
            if root:
                storage.write_bytes(uri, page.read_bytes())
                record.done(uri, {})
