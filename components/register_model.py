"""Judge the exported model, register it, and make it the champion."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register_model(
    config: str,
    root: str,
    run_id: str,
    model: str,
    image: str,
    registered: dsl.Output[dsl.Model],
) -> str:
    """Return "promoted" or "refused" for the exported model at its URI."""
    from components import steps

    return steps.register_model(config, root, run_id, model, image, registered)
