"""`flotilla manifest`: the TFJob of a configuration, for a look before anything is launched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from components.pod_defaults import DEFAULTS, PodDefaults
from components.tfjob.manifest import Place, manifest
from pipelines.commands import output, print_json
from trainer import storage
from trainer.config import Config
from trainer.launcher import Job

# What only a run knows stands in the document as words.
RUN_ID, DATASET, ROOT, NAMESPACE = "RUN-ID", "DATASET", "gs://BUCKET", "NAMESPACE"


def document(config: Config, defaults: PodDefaults = DEFAULTS) -> dict[str, Any]:
    """Return the TFJob of `config`, with placeholders for what only a run knows.

    `defaults` is what a run gives to pods of which the configuration says nothing.
    """
    root = config.storage.root or ROOT
    job = Job(
        config=config,
        dataset=storage.join(root, "datasets", DATASET),
        checkpoints=storage.join(root, RUN_ID, "checkpoints"),
        workdir=Path(),
    )
    return manifest(job, Place(namespace=NAMESPACE, defaults=defaults))


def print_manifest(config: Config, *, as_json: bool) -> None:
    """Write the document to standard output, as YAML or in the JSON object of every command."""
    tree = document(config)
    if as_json:
        print_json({"status": "done", "manifest": tree})
        return
    with output():
        sys.stdout.write(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
