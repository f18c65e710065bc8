"""The container image of every component and of every task of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flotilla.components.kfp_internals import make_component
from flotilla.trainer.storage.s3_endpoint import BOTO_KEYS, KFP_KEYS, KFP_SECRET

IMAGE = "flotilla-python:0.1.0"


def component(function: Callable[..., Any]) -> Any:
    """Make a KFP component from a function; inside a running step return the function."""
    return make_component(function, IMAGE)


#: The keys of the secret; each existing key becomes an environment variable of the same name.
SECRET_KEYS = (*KFP_KEYS, *BOTO_KEYS)


@dataclass(frozen=True, kw_only=True)
class PodDefaults:
    """The image of the run, and the name of the secret with the keys of its object store."""

    image: str = IMAGE
    store_secret: str = KFP_SECRET

    def secret_env(self) -> dict[str, str]:
        """Return the secret's variables, in the form of `cluster.kubernetes.pod.secret_env`."""
        return {key: f"{self.store_secret}/{key}" for key in SECRET_KEYS if self.store_secret}


DEFAULTS = PodDefaults()
