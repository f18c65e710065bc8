"""Reads the rows of growing tables from a checkpoint, with TensorFlow's own reader."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import PREFIX, find_path, is_variable
from flotilla.trainer.embeddings.table_shard import EVICTED, GIVEN

# Shards by table name and shard number.
Shards = Mapping[tuple[str, int], "GrownShard"]


@dataclass(frozen=True, kw_only=True)
class GrownShard:
    """One shard of a table.

    Attributes:
        ids: the ids that have a row, by slot; an id with two rows occurs twice.
        given: number of rows that were assigned to ids.
        empty: number of `ids` whose row has only zeros, although new rows never do.
        unfit: variables of rows or of the optimizer that are not finite or have the wrong length.
    """

    ids: npt.NDArray[np.int64]
    given: int
    evicted: int
    empty: int
    unfit: tuple[str, ...]
    slots: int

    @property
    def twice(self) -> int:
        return sum(count > 1 for count in Counter(self.ids.tolist()).values())

    @property
    def miscounted(self) -> int:
        """Return the difference between the actual number of rows and the table's own count."""
        return abs(len(self.ids) - (self.given - self.evicted))


@cache
def grown(uri: str, created: str, tables: tuple[str, ...]) -> Shards:
    """Return the shards of the tables in a checkpoint; `created` is part of the cache key."""
    del created
    with tempfile.TemporaryDirectory(prefix="flotilla-rows-") as folder:
        storage.fetch(uri, Path(folder, "checkpoint"))
        values = _values_of(Path(folder, "checkpoint"))
    found = {}
    for table in tables:
        for number in range(len(values)):
            own = f"model/{table}_embedding/shard_{number}_"
            if f"{own}rows" not in values:
                break
            found[table, number] = _shard_of(values, own)
    return found


def _values_of(folder: Path) -> dict[str, npt.NDArray[Any]]:
    own = tf.train.load_checkpoint(str(folder / PREFIX))
    keys = own.get_variable_to_shape_map()
    return {find_path(key): own.get_tensor(key) for key in keys if is_variable(key)}


def _shard_of(values: Mapping[str, npt.NDArray[Any]], own: str) -> GrownShard:
    rows, used = values[f"{own}rows"], values[f"{own}used"]
    # The last slot is shared by all ids without a row.
    live = np.flatnonzero(used[:-1] >= 0)
    name = f"{own.removeprefix('model/')}rows".replace("/", "_")
    slots = [path for path in values if path.startswith("optimizer/") and name in path]
    by_rows = {path: values[path] for path in (f"{own}rows", f"{own}ids", f"{own}used", *slots)}
    return GrownShard(
        ids=values[f"{own}ids"][live],
        given=int(values[f"{own}tally"][GIVEN]),
        evicted=int(values[f"{own}tally"][EVICTED]),
        empty=int((rows[live] == 0).all(axis=1).sum()),
        unfit=tuple(
            path
            for path, each in by_rows.items()
            if len(each) != len(rows) or not np.isfinite(each).all()
        ),
        slots=len(slots),
    )


def faults_of(shards: Shards, *, halfway: int, counts: bool) -> Iterator[str]:
    """Describe the errors in the rows of one checkpoint.

    Up to `halfway` ids per shard may be inconsistent, because their step was interrupted. With
    `counts`, the number of rows is compared with the table's own count.
    """
    for (table, number), each in shards.items():
        where = f"shard {number} of {table}"
        if each.twice > halfway:
            yield f"{where}: {each.twice} ids have two rows, and {halfway} are the most"
        if counts and each.miscounted > halfway:
            yield f"{where}: {len(each.ids)} rows, of {each.given} given and {each.evicted} taken"
        if each.empty:
            yield f"{where}: {each.empty} rows are of zeros"
        for path in each.unfit:
            yield f"{where}: {path} is not finite, or of another length"
        if not each.slots:
            yield f"{where}: the optimizer has no slots of its rows"
    for table in {table for table, _ in shards}:
        ids = [set(each.ids.tolist()) for (own, _), each in shards.items() if own == table]
        if both := sum(map(len, ids)) - len(set().union(*ids)):
            yield f"{both} ids of {table} are in two shards"


def lost_between(earlier: Shards, later: Shards, *, halfway: int) -> Iterator[str]:
    """Describe the ids that are missing in a later checkpoint although they were not evicted."""
    if earlier.keys() != later.keys():
        yield "it has other shards"
        return
    for (table, number), before in earlier.items():
        after, where = later[table, number], f"shard {number} of {table}"
        if after.given < before.given:
            yield f"{where}: {after.given} rows were given, and {before.given} before"
        evicted = after.evicted - before.evicted
        gone = len(set(before.ids.tolist()) - set(after.ids.tolist()))
        if gone > max(0, evicted) + (halfway if after.evicted else 0):
            yield f"{where}: {gone} ids are gone, and {evicted} rows were taken back"


def in_words(all_shards: Sequence[Shards]) -> str:
    """Summarize the rows of several checkpoints, oldest first, in one line."""
    if not all_shards:
        return "no rows"
    last = all_shards[-1].values()
    return (
        f"{len(all_shards)} checkpoints read, {sum(len(each.ids) for each in last)} rows in the "
        f"last, {sum(each.evicted for each in last)} taken back, "
        f"{sum(each.twice for shards in all_shards for each in shards.values())} ids with two "
        f"rows, {sum(each.miscounted for shards in all_shards for each in shards.values())} "
        "miscounted"
    )
