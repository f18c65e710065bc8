"""Removes the items of a plan one by one, and files that interrupted writes left behind.

An item is removed before the items that it refers to, and the manifest of a directory is removed
before its other files. Therefore, wherever the removal stops, no remaining item looks complete
without its inputs. Each item is checked again just before its removal.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from flotilla.components import in_use
from flotilla.pipelines.retention import (
    RUN,
    SHARED,
    SWEEP,
    VERSION,
    Item,
    Plan,
    Policy,
    find_kept_versions,
    find_reachable,
    find_run,
    make_plan,
)
from flotilla.pipelines.retention.inventory import is_changed, read, read_model
from flotilla.trainer import storage
from flotilla.trainer.cluster.lease import remove_expired
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.store import run_parallel

# Remove these files of a run last, because they identify the run and determine its age.
_LAST = ("config.json", "events.jsonl", "lock")
_RECORDS, _PART = "steps", "part"
_log = logging.getLogger(__name__)
# Writing a part takes minutes, so a preparation without a new part for this long has ended.
FORSAKEN = timedelta(days=7)
# Maximum time by which this machine's clock may be ahead. Only files that look at least a day old
# are removed, so a smaller error cannot affect the files of a running process.
_MOST_AHEAD = timedelta(hours=1)


def require_clock(root: str) -> None:
    """Raise `UserError` if this machine's clock is more than an hour ahead of the storage's.

    With a clock that is ahead, the files of running processes look old enough to remove.
    """
    try:
        ahead = timedelta(seconds=round(time.time() - storage.read_clock(root)))
    except storage.Missing:
        # Nothing can be removed from a root that does not exist.
        return
    if ahead > _MOST_AHEAD:
        raise UserError(
            f"nothing was removed: the clock of this machine is {ahead} ahead of the clock of "
            f"{root}, so files in use would look old; correct the clock and try again"
        )


def remove(
    root: str, workdir: Path, plan: Plan, wanted: Policy, done: Callable[[Item], None]
) -> tuple[Item, ...]:
    """Remove the items of `plan` that may still be removed, and return the items that are kept.

    `done` is called with each removed item. If some items cannot be removed, the first `UserError`
    is raised after all other items were tried. `Unavailable` is raised immediately.
    """
    # Plan again, because the root may have changed since the plan was made.
    found = read(root, workdir)
    now = {each.path: each for each in make_plan(found, wanted, datetime.now(UTC)).going}
    stays = {each.path: each for each in plan.going if each.path not in now}
    going = [now[each.path] for each in plan.going if each.path in now]
    stays |= _retire_versions(root, [each for each in going if each.kind == VERSION], wanted)
    # A kept item also keeps the items that it needs.
    needed = find_reachable(
        found.items, [found.items[path] for path in stays if path in found.items]
    )
    runs = set(map(find_run, needed))
    failures: list[UserError] = []
    for item in going:
        try:
            if not (item.path in needed or item.path in runs) and _remove(root, workdir, item):
                done(item)
                continue
        except storage.Unavailable:
            raise
        except UserError as error:
            failures.append(error)
        stays[item.path] = item
        more = find_reachable(found.items, [item], needed)
        needed |= more
        runs |= set(map(find_run, more))
    if failures:
        raise failures[0]
    return tuple(stays.values())


def _remove(root: str, workdir: Path, item: Item) -> bool:
    with _may_go(root, workdir, item) as free:
        if free:
            uri = _uri(root, item)
            if item.kind == RUN:
                _remove_run(uri)
            storage.delete(uri)
    return free


def _uri(root: str, item: Item) -> str:
    return storage.join(root, *item.path.split("/"))


def _remove_run(uri: str) -> None:
    if storage.local_path(uri) is not None:
        # `storage.delete` renames the whole folder first, so the order does not matter.
        return
    names = set(storage.names(uri)) - {_RECORDS}
    for some in (names - set(_LAST), names & set(_LAST)):
        run_parallel(lambda name: storage.delete(storage.join(uri, name)), sorted(some))


@contextmanager
def _may_go(root: str, workdir: Path, item: Item) -> Iterator[bool]:
    if item.kind == RUN and is_changed(root, workdir, item):
        yield False
    elif item.kind in (RUN, SWEEP):
        with _lock(root, workdir, item) as free:
            yield free
    elif item.kind in SHARED.values():
        seen = item.last.timestamp() if item.last else 0.0
        with in_use.removing(root, item.path, seen) as free:
            yield free
    else:
        yield True


def _retire_versions(root: str, going: list[Item], wanted: Policy) -> dict[str, Item]:
    """Record the lineage of each version that will be removed, and prevent its promotion.

    Return the versions that must be kept, because their promotion has begun in the meantime.
    """
    stays = {}
    for name in sorted({each.path.split("/")[2] for each in going}):
        ours = [each for each in going if each.path.split("/")[2] == name]
        home = registry.home(root, name)
        for item in ours:
            with suppress(storage.NotPublished):
                lineage: Any = storage.read_manifest(_uri(root, item)).fields.get("lineage", {})
                registry.retire(home, _number(item), lineage)
        needed = set(find_kept_versions(read_model(root, name), wanted.versions))
        for item in ours:
            if item.path in needed:
                registry.restore(home, _number(item))
                stays[item.path] = item
    return stays


def _number(item: Item) -> int:
    return int(item.path.rpartition("/")[2])


@contextmanager
def _lock(root: str, workdir: Path, item: Item) -> Iterator[bool]:
    """Lock a local run, so that it cannot be resumed during its removal."""
    descriptors = []
    try:
        for folder in {storage.local_path(root), workdir.absolute()} - {None}:
            with suppress(FileNotFoundError, NotADirectoryError):
                path = Path(str(folder), item.path, "lock")
                descriptors.append(os.open(path, os.O_RDONLY))
                fcntl.flock(descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _leases_removed(uri: str) -> list[str]:
    try:
        return remove_expired(uri)
    except storage.Unavailable:
        raise
    except UserError as error:
        # Continue, so that a failure here does not stop the cleanup of other runs.
        _log.warning("skipped: %s", error)
        return []


def _remove_parts(root: str) -> list[str]:
    above = storage.join(root, "preparing")
    folders = [storage.join(above, name) for name in storage.names(above)]
    removed = [each for each in folders if _is_forsaken(each)]
    run_parallel(storage.delete, removed)
    return removed


def _is_forsaken(folder: str) -> bool:
    """Return whether a folder contains only parts of datasets, none of them recent."""
    since = datetime.now(UTC) - FORSAKEN
    parts = storage.names(folder)
    try:
        found = [storage.read_manifest(storage.join(folder, name)) for name in parts]
        made = [each.created_at for each in found if each.kind == _PART]
        if datetime.max.replace(tzinfo=UTC) in made:
            raise UserError("the modification time of a dataset part cannot be read")
        return bool(made) and len(made) == len(parts) and max(made) < since
    except storage.Unavailable:
        raise
    except UserError as error:
        _log.warning("skipped: %s: %s", folder, error)
        return False


def collect(root: str) -> tuple[str, ...]:
    """Remove files that interrupted writes left below `root`, and return their URIs."""
    folders = [storage.join(root, run, "checkpoints") for run in storage.names(root)]
    leases = chain.from_iterable(run_parallel(_leases_removed, folders))
    return (*leases, *_remove_parts(root), *storage.collect_garbage(root))
