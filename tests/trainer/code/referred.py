"""Finds the code bundles that runs and schedules refer to."""

import json
from contextlib import suppress

from flotilla.trainer import storage
from flotilla.trainer.code import FOLDER, OF_RUN, OF_SCHEDULES


def referred(root: str) -> set[str]:
    below = [storage.join(root, each) for each in storage.names(root) if each != FOLDER]
    schedules = storage.join(root, OF_SCHEDULES)
    notes = [storage.join(each, OF_RUN) for each in below]
    notes += [storage.join(schedules, each) for each in storage.names(schedules)]
    found: set[str] = set()
    for note in notes:
        with suppress(storage.Missing, storage.Corrupt, ValueError):
            found |= set(map(storage.name_of, json.loads(storage.read_bytes(note))["bundles"]))
    return found
