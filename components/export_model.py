"""Export a blessed model and prove that what was written is the same model."""

from typing import Any

from kfp import dsl

from components import descriptor
from components.image import component
from components.locations import output_of, run_at, scratch_folder
from components.records.record import StepOutput, tried
from trainer import storage
from trainer.code.delivery import configured


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
    from components.export_model import run_step

    return run_step(
        config,
        root,
        run_id,
        dataset,
        checkpoint,
        decision,
        model,
        dataset_descriptor,
        checkpoint_descriptor,
        decision_descriptor,
    )


def run_step(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    checkpoint: str,
    decision: str,
    model: Any,
    dataset_descriptor: Any = None,
    checkpoint_descriptor: Any = None,
    decision_descriptor: Any = None,
) -> str:
    """Export; `model` is a KFP Model."""
    call = dict(locals())

    def work(record: StepOutput) -> str:
        with scratch_folder() as scratch:
            descriptor.check(dataset_descriptor, dataset)
            descriptor.check(checkpoint_descriptor, checkpoint)
            descriptor.check(decision_descriptor, decision)
            from trainer.export import export

            settings = configured(config)
            # A decision against another champion is another decision, and leads to another model.
            created = storage.read_manifest(checkpoint).created
            origin = (dataset, created, decision, *settings.export.formats)
            output = output_of(root, run_id, "model", checkpoint, *origin)
            exported = export.export(settings, dataset, checkpoint, decision, output, scratch)
            forms = exported.parity["formats"]
            differences = {name: form["max_difference"] for name, form in forms.items()}
            record.done(exported.uri, differences)
            descriptor.describe(model, exported.uri, differences)
            return exported.uri

    return tried("export_model", run_at(root, run_id), work, inputs={"dataset": dataset}, call=call)
