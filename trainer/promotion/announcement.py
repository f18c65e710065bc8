"""Tells the trackers of a promotion: what `register_model` does, and a person by `models promote`."""

from __future__ import annotations

from trainer.promotion import registry
from trainer.tracking import addresses, promotions
from trainer.tracking.hub import PromotedModel

# Of the lineage; its metrics are added.
_WORDS = ("run_id", "dataset", "commit", "image")


def announce(root: str, name: str, number: int, hub: str) -> None:
    """Tell the trackers that a version was promoted; what they do not take is a line of log.

    Args:
        root: URI of the registry's root.
        name: of the model.
        number: of the version.
        hub: `registry.hub` of the run; where it is empty, a variable names the address.
    """
    at = addresses.hub_of(hub)
    if not (at or addresses.is_tracked()):
        return
    version = registry.version(root, name, number)
    origin = version.manifest.fields.get("lineage", {})
    numbers = {f"test_{key}": value for key, value in origin.get("metrics", {}).items()}
    model = PromotedModel(
        name=name,
        version=number,
        uri=version.uri,
        run_id=str(origin.get("run_id", "")),
        # Of a run that is resumed long after its promotion another one may be.
        is_champion=registry.champion_number(root, name) == number,
        properties={**{key: origin.get(key) for key in _WORDS}, **numbers},
    )
    promotions.announce(model, at)
