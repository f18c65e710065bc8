"""Under which name a dataset is published, and whether it is there. Free of TensorFlow."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from trainer import user_code
from trainer.config.data import DataConfig
from trainer.data.spec import SCHEMA

# What says where the data is found, or how it is read, and not what it is.
_NOT_CONTENT = {
    "manual_dir",
    "partition",
    "disk",
    "runner",
    "spans",
    "buckets",
    "gate",
    "schema_file",
}

_LONGEST = 60
_log = logging.getLogger(__name__)


def dataset_key(config: DataConfig, identity: Mapping[str, Any]) -> str:
    """Return the name of the published directory for a configuration and its source's identity."""
    section = config.model_dump(mode="json", exclude=_NOT_CONTENT)
    if config.map:
        module = config.map.partition(":")[0]
        section["map_source"] = user_code.digest("data.map", module)
    builder = "" if config.source else config.dataset.partition(":")[0]
    # The version of a builder that is installed, or is ours, says what it makes.
    if ":" in config.dataset and user_code.is_users(builder):
        section["builder_source"] = user_code.digest("data.dataset", builder)
    content = json.dumps({**section, **identity, "schema": SCHEMA}, sort_keys=True)
    # Of files the last name alone: a path may be longer than a name can be.
    last = config.name.rstrip("/").rpartition("/")[2][-_LONGEST:] if config.source else config.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last)
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
