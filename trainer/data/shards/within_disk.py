"""What `data.disk` means for one dataset: whether it is all staged, or shards come and go.

Free of TensorFlow. The chief and all workers come to the same answer, since it depends only on the
configuration, the manifest and the number of workers.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.config.data import bytes_of
from trainer.config.schema import Config
from trainer.data.spec import DatasetSpec
from trainer.errors import ConfigError
from trainer.storage import Manifest

TRAIN, VALIDATION = "train", "validation"
# In the working folder of a worker: the shards, and the pipes by which its graphs ask for them.
FOLDER = "feed"
SHARDS = "held"
ASK = f"{FOLDER}/ask"
FAILED = "failed"
# Shards that are read in turn, as far as the disk has room for them.
AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Shards come and go, as they do not fit together.

    Attributes:
        limit: bytes of shards on the disk of a worker.
        at_once: shards that training reads in turn.
        attempt: tells the graphs of this attempt from those of one before.
    """

    limit: int
    at_once: int
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """The shards from `first` to before `last`; of their examples `skip` are passed over."""

    first: int
    last: int
    skip: int
    take: int


def streaming_of(config: Config, manifest: Manifest, workers: int) -> Streaming | None:
    """Return how shards stream to a worker; None where all that it needs fits in `data.disk`.

    Raises:
        ConfigError: not even two shards fit, or all workers share one folder.
    """
    if not config.data.disk:
        return None
    spec, sizes = DatasetSpec.from_manifest(manifest), {e.path: e.bytes for e in manifest.files}
    train = [sizes[name] for name in spec.files(TRAIN)]
    measured = [sizes[name] for name in spec.files(VALIDATION)] if VALIDATION in spec.shards else []
    of = max(1, workers) if config.data.partition == "disjoint" else 1
    limit = bytes_of(config.data.disk)
    if max(sum(train[index::of]) for index in range(of)) + sum(measured) <= limit:
        return None
    if config.cluster.in_process:
        raise ConfigError(
            "data.disk: with cluster.in_process all workers share one folder, and shards cannot "
            "come and go; leave one of the two out"
        )
    largest = max(train)
    other = max([*sorted(train)[:-1], *measured], default=0)
    if largest + other > limit:
        count = math.ceil(2.2 * sum(train) / limit)
        raise ConfigError(
            f"data.disk: {config.data.disk} is too little: a shard of {_megabytes(largest)} is "
            f"read while one of {_megabytes(other)} comes; set data.disk to "
            f"{_megabytes(largest + other)} or more, or data.shards to {count} or more"
        )
    # While some are read, as many come, and there is always room for any other one.
    room = (limit - max(largest, other)) // (2 * largest)
    return Streaming(limit=limit, at_once=max(1, min(AT_ONCE, room)))


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 10**5) / 10:.1f}MB" if size >= 10**6 else f"{size}B"


def order_of(names: Sequence[str], seed: int, epoch: int) -> list[str]:
    """Return shards in the order of one epoch."""
    return random.Random(f"{seed} {epoch}").sample(names, len(names))


def part_range(shards: Sequence[int], batch_size: int, part: int, of: int) -> PartRange:
    """Return where a part of a split is, which is a whole number of batches.

    The parts have equal numbers of batches but for one; `shards` are the examples of each shard.
    """
    examples = sum(shards)
    batches = math.ceil(examples / batch_size)
    begin, end = (min(examples, batches * number // of * batch_size) for number in (part, part + 1))
    if begin == end:
        return PartRange(first=0, last=0, skip=0, take=0)
    ends = [sum(shards[: index + 1]) for index in range(len(shards))]
    first = next(index for index, last in enumerate(ends) if last > begin)
    last = next(index for index, last in enumerate(ends) if last >= end) + 1
    return PartRange(first=first, last=last, skip=begin - sum(shards[:first]), take=end - begin)
