"""Download a dataset, split and shard it, and publish it; a published one is reused."""

from kfp import dsl

from components import descriptor, in_use
from components.image import component
from components.records import run_store
from components.records.record import Step
from trainer import events
from trainer.code import bundle
from trainer.config.data import DataConfig


@component
def prepare_data(
    data: str, root: str, seal: str, data_code: str, dataset: dsl.Output[dsl.Dataset]
) -> str:
    """Publish the dataset of the data section below `root`; return its URI."""
    from components.prepare_data import work
    from components.records.record import run

    return run(work, locals())


def work(step: Step) -> str:
    """Prepare the dataset with a bundle of code, or none.

    The seal is for KFP's cache alone: it differs in every run while the dataset is not there and
    whole, so that the cache never returns its URI then.
    """
    with run_store.scratch_folder() as scratch:
        from trainer.data import prepare

        bundle.enter(step.data_code)
        section = DataConfig.model_validate_json(step.data)
        key = f"version of {section.name}"
        chosen = section.version or run_store.pinned(key)
        exact = section.model_copy(update={"version": chosen})
        prepared = prepare.prepare(exact, step.root, scratch)
        while not in_use.use(prepared.uri):
            # Retention has removed it at this very moment.
            prepared = prepare.prepare(exact, step.root, scratch)
        fields = prepared.manifest.fields
        version = fields["version"]
        run_store.pin(key, version)
        if version and not chosen:
            events.emit(events.NewestVersion(dataset=section.name, version=version))
        examples = {split: each["examples"] for split, each in fields["splits"].items()}
        notes = list(fields.get("notes", ()))
        for text in notes:
            events.emit(events.DataNote(text=text))
        made = {"reused": prepared.reused, "version": version, "notes": notes}
        step.output.done(prepared.uri, {**examples, **made})
        origin = {"fingerprint": fields["fingerprint"], "version": version}
        descriptor.describe(step.dataset, prepared.uri, {**origin, **examples})
        return prepared.uri
