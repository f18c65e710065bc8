"""Hold a dataset against the rules of the configuration, and against the champion's dataset."""

from pathlib import Path

from kfp import dsl

from components import descriptor
from components.image import component
from components.records.record import Step
from components.records.run_store import output_of
from trainer import events
from trainer.code.bundle import configured


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
    from components.records.record import run
    from components.validate_data import work

    return run(work, locals())


def work(step: Step) -> str:
    """Return `accepted` or `refused`; the file `validation_uri` gets the URI of what was found."""
    descriptor.check(step.dataset_descriptor, step.dataset)
    # It loads SciPy, which takes longer than a run that finds nothing new.
    from trainer.data_gate import validate

    settings = configured(step.config)
    found = validate.check(settings, step.dataset, validate.opponent(step.root, settings.name))
    uri = output_of(step.root, step.run_id, "validation", step.dataset, found.digest)
    validate.publish(found, uri)
    facts = found.facts
    for line in facts["warnings"]:
        events.emit(events.DataNote(text=line, is_warning=True))
    judged = {
        "decision": found.decision,
        "warned": len(facts["warnings"]),
        "reasons": facts["reasons"],
        "warnings": facts["warnings"],
    }
    step.output.done(uri, judged)
    descriptor.describe(step.validation, uri, judged)
    Path(step.page.path).write_bytes(found.page)
    Path(step.validation_uri).write_text(uri, encoding="utf-8")
    return found.decision
