"""Publish the user's modules for a run, so that retention leaves them to it."""

from __future__ import annotations

from pathlib import Path

from components import in_use
from trainer.code.bundle import Bundle, publish
from trainer.config.schema import Config


def bundled(config: Config, folder: str | Path, root: str) -> tuple[Config, Bundle]:
    """Publish a folder below `root`; return the configuration with it as `code`, and the bundle.

    It is marked as used: one that was published long ago is as young as this call, and stays until
    the run, which may wait for days, has noted it.

    Raises:
        UserError: see `publish`.
    """
    bundle = publish(Path(folder), root)
    while not in_use.use(bundle.uri):
        # Retention has removed it at this very moment.
        bundle = publish(Path(folder), root)
    return config.model_copy(update={"code": bundle.uri}), bundle
