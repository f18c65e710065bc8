"""The exit step: runs after success, refusal and failure alike; ends the job and reports."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
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
    from components import steps

    steps.finish(status, root, launcher, kubernetes, kfp_run_id, report, summary)
