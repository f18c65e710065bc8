"""Launch the training cluster, watch it, and give the final checkpoint."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    image: str,
    store_secret: str,
    model: dsl.Output[dsl.Model],
    mlpipeline_ui_metadata: dsl.Output[dsl.Artifact],
) -> str:
    """Train on the dataset at URI `dataset`; give the URI of the final checkpoint."""
    from components import steps

    return steps.train_model(
        config, root, run_id, dataset, image, store_secret, model, mlpipeline_ui_metadata
    )
