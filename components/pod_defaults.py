"""What the pods of a job get from the run where the configuration says nothing."""

from __future__ import annotations

from dataclasses import dataclass

from components.image import IMAGE
from trainer.storage.endpoint import BOTO_KEYS, KFP_KEYS, KFP_SECRET

#: Keys of the secret, each the variable of the same name; those that it does not have are left out.
SECRET_KEYS = (*KFP_KEYS, *BOTO_KEYS)


@dataclass(frozen=True, kw_only=True)
class PodDefaults:
    """The run's own image, and the name of the secret that opens its object store."""

    image: str = IMAGE
    store_secret: str = KFP_SECRET

    def secret_env(self) -> dict[str, str]:
        """Return the variables of the secret, as `cluster.kubernetes` would say them."""
        return {key: f"{self.store_secret}/{key}" for key in SECRET_KEYS if self.store_secret}


DEFAULTS = PodDefaults()
