"""Export a blessed model and prove that what was written is the same model."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def export_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    decision: str,
    exported: dsl.Output[dsl.Model],
) -> str:
    """Export the checkpoint that the decision at its URI has blessed; give the model's URI."""
    from components import steps

    return steps.export_model(config, root, run_id, dataset, checkpoint, decision, exported)
