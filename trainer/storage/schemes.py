"""Which store serves which scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.errors import UserError
from trainer.storage.file import FileStore
from trainer.storage.store import Store
from trainer.storage.uri import scheme_of

STORES: Mapping[str, Callable[[], Store]] = {"file": FileStore}


def store_for(uri: str) -> Store:
    """Return the store that serves `uri`; raises `UserError` where there is none."""
    scheme = scheme_of(uri)
    if scheme not in STORES:
        raise UserError(f"{uri}: {scheme}:// is not available in this version; use file:///path")
    return STORES[scheme]()
