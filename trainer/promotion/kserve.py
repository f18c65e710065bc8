"""Writes a KServe InferenceService for an exported model."""

from __future__ import annotations

import re

import yaml

from flotilla.trainer import storage
from flotilla.trainer.storage.uri import locate, speaks_s3


def service(name: str, uri: str) -> str:
    """Return the YAML of a service for the model `name`, whose version is published at `uri`."""
    document = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": service_name(name)},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "tensorflow"},
                    "storageUri": _storage_uri(storage.join(uri, "serving", name)),
                }
            }
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def _storage_uri(uri: str) -> str:
    if not speaks_s3(uri):
        return uri
    # Leave out the options of the URI, which only Flotilla's client understands.
    place = locate(uri)
    return f"s3://{place.bucket}/{place.key}"


def service_name(name: str) -> str:
    """Return a valid Kubernetes name for a service: lowercase letters, digits and `-`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name)
    return plain if plain[0].isalpha() else f"model-{plain}"
