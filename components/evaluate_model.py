"""Measure a checkpoint on the test split."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    metrics: dsl.Output[dsl.Metrics],
    confusion: dsl.Output[dsl.ClassificationMetrics],
    roc: dsl.Output[dsl.ClassificationMetrics],
) -> str:
    """Evaluate the checkpoint on the dataset; give the URI of the evaluation."""
    from components import steps

    return steps.evaluate_model(config, root, run_id, dataset, checkpoint, metrics, confusion, roc)
