"""A KServe InferenceService for an exported model."""

from __future__ import annotations

import re

import yaml

from trainer import storage


def service(name: str, uri: str) -> str:
    """Return the YAML of a service for model `name`, published at `uri`.

    KServe takes the folder that holds the versions, as TensorFlow Serving does.
    """
    document = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": service_name(name)},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "tensorflow"},
                    # Without the options of the URI, which are for Flotilla's own client.
                    "storageUri": storage.join(uri, "serving", name).partition("?")[0],
                }
            }
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def service_name(name: str) -> str:
    """Return a name that Kubernetes accepts for a service: letters, digits and `-`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name)
    return plain if plain[0].isalpha() else f"model-{plain}"
