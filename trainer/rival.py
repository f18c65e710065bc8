"""Whom a run meets in the registry: the champion that it is held against, or begins from."""

from __future__ import annotations

from trainer import registry, storage
from trainer.errors import UserError


def champion_checkpoint(root: str, name: str) -> str:
    """Return the URI of the checkpoint that became the champion; empty where there is none yet.

    Raises:
        UserError: the champion's checkpoint is gone, as it is when its run was deleted.
    """
    found = registry.champion(root, name)
    if found is None:
        return ""
    uri = str(found.manifest.fields.get("lineage", {}).get("checkpoint", ""))
    if not uri or not storage.is_published(uri):
        raise UserError(
            f"training.warm_start: the checkpoint of {name}'s champion, version {found.number}, is "
            f"not there any more ({uri or 'it names none'}): name another checkpoint, or leave it "
            "empty"
        )
    return uri


def rival(root: str, name: str, checkpoint: str) -> registry.Version | None:
    """Return the champion that the model of a checkpoint has to stand up to.

    A run that is resumed while its own model is champion is not held against itself, but against
    the champion before, so that it ends as it did. One that was followed meets who followed it:
    nothing is promoted again over a better one.

    Args:
        root: URI below which the registry stands.
        name: of the model.
        checkpoint: URI of a published checkpoint.
    """
    created = storage.read_manifest(checkpoint).created
    known = {each.number: each for each in registry.versions(root, name)}
    for made in reversed(registry.promotions(root, name)):
        found = known.get(made.version) or registry.crowned(root, name, made.version)
        origin = found.manifest.fields.get("made_from", {})
        if (origin.get("checkpoint"), origin.get("checkpoint_created")) != (checkpoint, created):
            return found
    return None
