"""Download a dataset, split and shard it, and publish it; a published one is reused."""

from typing import Any

from kfp import dsl

from components import descriptor, in_use, locations, pinned_inputs
from components.image import component
from components.records.record import StepOutput, tried
from trainer import events
from trainer.code import delivery
from trainer.config.data import DataConfig


@component
def prepare_data(
    data: str, root: str, seal: str, data_code: str, dataset: dsl.Output[dsl.Dataset]
) -> str:
    """Publish the dataset of the data section below `root`; return its URI."""
    from components.prepare_data import run_step

    return run_step(data, root, seal, data_code, dataset)


def run_step(data: str, root: str, _seal: str, data_code: str, dataset: Any) -> str:
    """Prepare the dataset with a bundle of code, or none; `dataset` is a KFP Dataset.

    The seal exists for KFP's cache alone: it differs in every run until the dataset is published,
    and again when the dataset is gone or damaged, so that the cache never returns its URI then.
    """
    call = dict(locals())
    at = locations.run_at(root, locations.run_id_in(dataset.uri, "prepare-data"))

    def work(record: StepOutput) -> str:
        with locations.scratch_folder() as scratch:
            from trainer.data import prepare

            delivery.enter(data_code)
            section = DataConfig.model_validate_json(data)
            key = f"version of {section.name}"
            chosen = section.version or pinned_inputs.pinned(key)
            exact = section.model_copy(update={"version": chosen})
            prepared = prepare.prepare(exact, root, scratch)
            while not in_use.use(prepared.uri):
                # Retention has removed it at this very moment.
                prepared = prepare.prepare(exact, root, scratch)
            fields = prepared.manifest.fields
            version = fields["version"]
            pinned_inputs.pin(key, version)
            if version and not chosen:
                events.emit(events.NewestVersion(dataset=section.name, version=version))
            examples = {split: each["examples"] for split, each in fields["splits"].items()}
            record.done(prepared.uri, {**examples, "reused": prepared.reused, "version": version})
            origin = {"fingerprint": fields["fingerprint"], "version": version}
            descriptor.describe(dataset, prepared.uri, {**origin, **examples})
            return prepared.uri

    return tried("prepare_data", at, work, call=call)
