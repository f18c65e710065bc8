"""Consensus: all processes that propose a value agree on one value, on any store.

Stores differ in their guarantees for conditional writes. Older stores ignore the condition, or
check it before they write. However, all stores make a written object visible to reads and listings.
This is enough for shared-memory Paxos (Gafni and Lamport, "Disk Paxos", 2003, with one disk): each
process writes only its own notes and reads the notes of all.

A note is either `<uri>/<round>-<token>-promised`, which is empty (its writer accepts no lower
round), or `<uri>/<round>-<token>-accepted`, which contains a proposal as JSON. Notes are never
changed or removed. Therefore a delayed write does no harm, and a process that was suspended for a
long time still reads the decision.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.runtime.json_records import parse_mapping

# Limits of the random pauses, in seconds. The pauses let one of two competing processes win.
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 2.0
_NOTE = re.compile(r"(\d+)-([0-9a-f]+)-(promised|accepted)")

Number = tuple[int, str]
Notes = list[tuple[Number, str]]


def decide(uri: str, proposal: Mapping[str, Any]) -> dict[str, Any]:
    """Return the proposal that all callers for `uri` agree on. Raises `UserError`."""
    token, pause = secrets.token_hex(8), _FIRST_PAUSE
    while True:
        highest = max((number for number, _ in _notes(uri)), default=(0, ""))
        number = (highest[0] + 1, token)
        _write(uri, number, "promised", b"")
        notes = _notes(uri)
        if not _outbid(number, notes):
            chosen = _last_accepted(uri, notes) or dict(proposal)
            _write(uri, number, "accepted", json.dumps(chosen).encode())
            if not _outbid(number, _notes(uri)):
                return chosen
        time.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _MAX_PAUSE)


def find_decided(uri: str) -> dict[str, Any] | None:
    """Return the decided proposal, or None. An unfinished decision is completed first."""
    return None if _last_accepted(uri, _notes(uri)) is None else decide(uri, {})


def _outbid(number: Number, notes: Notes) -> bool:
    return any(other > number for other, _ in notes)


def _last_accepted(uri: str, notes: Notes) -> dict[str, Any] | None:
    accepted = [number for number, word in notes if word == "accepted"]
    if not accepted:
        return None
    place = _place(uri, max(accepted), "accepted")
    try:
        return parse_mapping(storage.read_bytes(place))
    except ValueError:
        # Raise an error, because this proposal may have been decided already.
        raise storage.Corrupt(
            f"{place} is damaged: it does not contain a proposal; restore it from a backup"
        ) from None


def _notes(uri: str) -> Notes:
    found = (_NOTE.fullmatch(name) for name in storage.names(uri))
    return [((int(note[1]), note[2]), note[3]) for note in found if note]


def _write(uri: str, number: Number, word: str, content: bytes) -> None:
    storage.write_bytes(_place(uri, number, word), content)


def _place(uri: str, number: Number, word: str) -> str:
    return storage.join(uri, f"{number[0]:06d}-{number[1]}-{word}")
