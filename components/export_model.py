"""Export a blessed model and prove that what was written is the same model."""

from kfp import dsl

from components import descriptor
from components.image import component
from components.records.record import Step
from components.records.run_store import output_of, scratch_folder
from trainer import storage
from trainer.code.bundle import configured


@component
def export_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    decision: str,
    model: dsl.Output[dsl.Model],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
    checkpoint_descriptor: dsl.Input[dsl.Model] = None,
    decision_descriptor: dsl.Input[dsl.Artifact] = None,
) -> str:
    """Export the checkpoint that the decision at its URI has blessed; return the model's URI."""
    from components.export_model import work
    from components.records.record import run

    return run(work, locals())


def work(step: Step) -> str:
    """Export it; raises `UserError` where it is not blessed, or is another model then."""
    with scratch_folder() as scratch:
        descriptor.check(step.dataset_descriptor, step.dataset)
        descriptor.check(step.checkpoint_descriptor, step.checkpoint)
        descriptor.check(step.decision_descriptor, step.decision)
        from trainer.export import export

        settings = configured(step.config)
        # A decision against another champion is another decision, and leads to another model.
        created = storage.read_manifest(step.checkpoint).created
        origin = (step.dataset, created, step.decision, *settings.export.formats)
        output = output_of(step.root, step.run_id, "model", step.checkpoint, *origin)
        inputs = (step.dataset, step.checkpoint, step.decision)
        exported = export.export(settings, *inputs, output, scratch)
        forms = exported.parity["formats"]
        differences = {name: form["max_difference"] for name, form in forms.items()}
        step.output.done(exported.uri, differences)
        descriptor.describe(step.model, exported.uri, differences)
        return exported.uri
