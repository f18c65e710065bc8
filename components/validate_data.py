"""Hold a dataset against the rules of the configuration, and against the champion's dataset."""

from pathlib import Path
from typing import Any

from kfp import dsl

from components import descriptor
from components.image import component
from components.locations import output_of, run_at
from components.records.record import StepOutput, tried
from trainer.code.delivery import configured


# The word is the single output, as that of the gate.
@component
def validate_data(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    validation_uri: dsl.OutputPath(str),
    validation: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
) -> str:
    """Return "accepted" or "refused"; `validation_uri` is the URI of what was found."""
    from components.validate_data import run_step

    return run_step(
        config, root, run_id, dataset, validation_uri, validation, page, dataset_descriptor
    )


def run_step(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    uri_path: str,
    artifact: Any,
    page: Any,
    dataset_descriptor: Any = None,
) -> str:
    """Return `accepted` or `refused`; the file `uri_path` gets the URI of what was found.

    `page` is a KFP HTML artifact.
    """
    call = dict(locals())

    def work(record: StepOutput) -> str:
        descriptor.check(dataset_descriptor, dataset)
        # It loads SciPy, which takes longer than a run that finds nothing new.
        from trainer.data_gate import validate

        settings = configured(config)
        found = validate.check(settings, dataset, validate.opponent(root, settings.name))
        uri = output_of(root, run_id, "validation", dataset, found.digest)
        validate.publish(found, uri)
        facts = found.facts
        judged = {
            "decision": found.decision,
            "warned": len(facts["warnings"]),
            "reasons": facts["reasons"],
            "warnings": facts["warnings"],
        }
        record.done(uri, judged)
        descriptor.describe(artifact, uri, judged)
        Path(page.path).write_bytes(found.page)
        Path(uri_path).write_text(uri, encoding="utf-8")
        return found.decision

    return tried(
        "validate_data", run_at(root, run_id), work, inputs={"dataset": dataset}, call=call
    )
