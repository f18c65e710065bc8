"""One answer to a question that several processes ask at once, in any store, whoever dies.

Stores differ in what they promise of conditional writes; older ones overwrite what they should not,
or look first and write then. All keep this: what was written is read and listed from then on. With
no more than that, consensus is shared-memory Paxos (Gafni and Lamport, "Disk Paxos", 2003, with one
disk): each asker writes notes of its own, never over another's, and reads those of all.

A note is `<uri>/<round>-<token>-promised`, which is empty (its writer heeds no lower number), or
`<uri>/<round>-<token>-accepted`, which holds a proposal as JSON. Notes are never changed and never
removed: a write that was delayed changes nothing, and who was paused for a year still learns what
was decided. Free of TensorFlow.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from trainer import storage

# Two that outbid each other wait for different times: nobody else tells them who goes first.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
_NOTE = re.compile(r"(\d+)-([0-9a-f]+)-(promised|accepted)")

Number = tuple[int, str]
Notes = list[tuple[Number, str]]


def reach(uri: str, proposal: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one proposal that all who ever ask at `uri` get: this one, or another's.

    Args:
        uri: names the question; nothing but notes stands below it.
        proposal: the answer that is proposed, as JSON values.

    Raises:
        UserError: the store fails, or a note is damaged.
    """
    token, pause = secrets.token_hex(8), _FIRST_PAUSE
    while True:
        highest = max((number for number, _ in _notes(uri)), default=(0, ""))
        number = (highest[0] + 1, token)
        _write(uri, number, "promised", b"")
        notes = _notes(uri)
        if not _outbid(number, notes):
            chosen = _accepted(uri, notes) or dict(proposal)
            _write(uri, number, "accepted", json.dumps(chosen).encode())
            if not _outbid(number, _notes(uri)):
                return chosen
        time.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _outbid(number: Number, notes: Notes) -> bool:
    return any(other > number for other, _ in notes)


def _accepted(uri: str, notes: Notes) -> dict[str, Any] | None:
    """Return the proposal that was accepted last, if one was."""
    accepted = [number for number, word in notes if word == "accepted"]
    if not accepted:
        return None
    place = _place(uri, max(accepted), "accepted")
    try:
        return dict(json.loads(storage.read_bytes(place)))
    except (ValueError, TypeError):
        # It may have been decided: without it two could win.
        raise storage.Corrupt(f"{place} is damaged: it holds no proposal; restore it") from None


def _notes(uri: str) -> Notes:
    found = (_NOTE.fullmatch(name) for name in storage.children(uri))
    return [((int(note[1]), note[2]), note[3]) for note in found if note]


def _write(uri: str, number: Number, word: str, content: bytes) -> None:
    storage.write_bytes(_place(uri, number, word), content)


def _place(uri: str, number: Number, word: str) -> str:
    return storage.join(uri, f"{number[0]:06d}-{number[1]}-{word}")
