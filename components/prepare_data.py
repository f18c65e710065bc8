"""Download a dataset, split and shard it, and publish it; one that is published is reused."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare_data(data: str, root: str, seal: str, dataset: dsl.Output[dsl.Dataset]) -> str:
    """Publish the dataset of the data section below `root`; give its URI."""
    from components import steps

    return steps.prepare_data(data, root, seal, dataset)
