"""Hold the figures of a model against the policy of the configuration."""

from kfp import dsl

from components.image import IMAGE


# The word is the single output: KFP's local runner resolves a condition on no other.
@dsl.component(base_image=IMAGE, install_kfp_package=False)
def check_gate(
    config: str, root: str, run_id: str, evaluation: str, decision: dsl.OutputPath(str)
) -> str:
    """Return "blessed" or "refused"; `decision` is the URI of the reasons."""
    from components import steps

    return steps.check_gate(config, root, run_id, evaluation, decision)
