"""The exit step: runs after success, refusal and failure alike, and writes the report."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish(
    status: dsl.PipelineTaskFinalStatus, root: str, kfp_run_id: str, report: dsl.Output[dsl.HTML]
) -> None:
    """Write the report of what the run has published."""
    from components import steps

    steps.finish(status.state, root, kfp_run_id, report)
