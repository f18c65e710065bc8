"""The trials of a sweep are runs next to it, and stay as long as it does: it may go on with them.

On this machine a sweep is a folder with the journal of a study, on a cluster the run with
`trials/`, and each of its trials is a run whose name begins with that of it.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipelines.retention.plan import RUN, SWEEP, Item
from trainer.errors import UserError
from trainer.sweeps.study import FILE, OLD_FILE, read

_OF_CLUSTER = re.compile(r"(?P<sweep>.+)-t[0-9]{2,}")


def is_locked(folder: Path) -> bool:
    """Say whether a process of this machine has the run or the sweep in a folder open."""
    with suppress(OSError):
        descriptor = os.open(folder / "lock", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def with_sweeps(
    items: Mapping[str, Item], root: Path | None, workdir: Path, on_cluster: Iterable[str]
) -> dict[str, Item]:
    """Return items with the sweeps of this machine, and each trial as young as its sweep.

    Args:
        items: what is below a root, by path.
        root: folder of the root; None where it is a bucket.
        workdir: the sweeps there may have published their trials below the root.
        on_cluster: the runs below the root that are sweeps.
    """
    found = dict(items)
    for folder in dict.fromkeys([*filter(None, [root]), workdir]):
        for path in sorted([*folder.glob(f"*/{FILE}"), *folder.glob(f"*/{OLD_FILE}")]):
            sweep = _sweep(path.parent)
            if folder == root:
                found[sweep.path] = sweep
            for name in _trials(path.parent):
                _keep_with(found, name, sweep)
    sweeps = {name: items[name] for name in on_cluster if name in items}
    for name in items:
        match = _OF_CLUSTER.fullmatch(name)
        if match and match["sweep"] in sweeps:
            _keep_with(found, name, sweeps[match["sweep"]])
    return found


def _keep_with(found: dict[str, Item], name: str, sweep: Item) -> None:
    run = found.get(name)
    if run is not None and run.kind == RUN:
        last = max(run.last, sweep.last) if run.last and sweep.last else None
        found[name] = replace(run, last=last, busy=run.busy or sweep.busy)


def _sweep(folder: Path) -> Item:
    size, last = 0, 0.0
    for each in folder.iterdir():
        # It may be replaced at this moment.
        with suppress(OSError):
            found = each.stat()
            size, last = size + found.st_size, max(last, found.st_mtime)
    return Item(
        path=folder.name,
        kind=SWEEP,
        bytes=size,
        last=datetime.fromtimestamp(last, UTC),
        busy=is_locked(folder),
    )


def _trials(folder: Path) -> list[str]:
    try:
        return [each.run_id for each in read(folder).trials]
    except UserError:
        # It cannot go on either.
        return []
