"""The container image of all steps and of all training tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flotilla.trainer.storage.uri import BOTO_KEYS, KFP_KEYS, KFP_SECRET

IMAGE = "flotilla-python:0.1.0"


def component(function: Callable[..., Any]) -> Any:
    """Make a KFP component from a function. Inside a running step, return the function itself."""
    from kfp import dsl

    # Inside a running step, KFP does not load its compiler, so `dsl.component` does not exist.
    if not hasattr(dsl, "component"):
        return function
    return dsl.component(function, base_image=IMAGE, install_kfp_package=False)


#: Keys of the store's secret. Each key becomes an environment variable of the same name.
SECRET_KEYS = (*KFP_KEYS, *BOTO_KEYS)


@dataclass(frozen=True, kw_only=True)
class PodDefaults:
    """The run's image, and the name of the secret with the credentials of its object store."""

    image: str = IMAGE
    store_secret: str = KFP_SECRET

    def secret_env(self) -> dict[str, str]:
        """Return the secret's variables in the format of `cluster.kubernetes.pod.secret_env`."""
        return {key: f"{self.store_secret}/{key}" for key in SECRET_KEYS if self.store_secret}


DEFAULTS = PodDefaults()
