"""What `flotilla gc` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.cli import commands
from pipelines.runs import local
from trainer import storage
from trainer.cluster.lease import remove_expired
from trainer.errors import DONE
from trainer.storage.retry import in_parallel


def collect(
    config: Path | None, assignments: Sequence[str], workdir: Path, *, as_json: bool
) -> int:
    """Remove garbage below the storage root, name it, and return the exit code."""
    root = local.root_of(commands.load_file(config, assignments), workdir)
    removed = [*_expired_locks(root), *storage.collect_garbage(root)]
    sys.stderr.writelines(f"removed {uri}\n" for uri in removed)
    sys.stderr.write(f"{len(removed)} left-overs removed below {root}\n")
    if as_json:
        commands.print_json({"status": "done", "removed": removed})
    return DONE


def _expired_locks(root: str) -> list[str]:
    folders = [storage.join(root, run, "checkpoints") for run in storage.names(root)]
    return [uri for found in in_parallel(remove_expired, folders) for uri in found]
