"""A chief that finds snapshots, trains, takes some, and dies: `python -m tests.cluster.left`.

Its SPEC is a JSON file: `config` (sections that differ from the defaults), `uri` of the checkpoints
of its run, `saved`, the global step of the newest of them or null, and `torn`, whether it dies
while a server assigns a part of its last snapshot. A line of JSON says what was found and taken.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.cluster.lead import say
from tests.cluster.snapshotted import STEPS, described, differing, problem, values_of
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.training.recovery import ServerSnapshots


def main() -> None:
    """Begin as the outer loop does, and die."""
    spec, config, strategy = described()
    checkpoints = Checkpoints(spec["uri"], keep=1, scratch=Path("scratch"))
    snapshots = ServerSnapshots(config, strategy, checkpoints)
    found = snapshots.find(spec["saved"])
    strategy.build(problem(config))
    snapshots.begin()
    is_used = snapshots.restore()
    strategy.restored()
    begun = values_of(strategy.variables())
    values = {path: each.tolist() for path, each in begun.items()}
    strategy.run(STEPS)
    step = strategy.global_step()
    made = snapshots._made
    assert made
    made.take(step)
    taken = values_of(strategy.variables())
    strategy.run(STEPS)
    if spec["torn"]:
        tear(made)
    say(
        found=found,
        used=is_used,
        begun=values,
        step=step,
        taken={path: each.tolist() for path, each in taken.items()},
        changed=len(differing(taken, values_of(strategy.variables()))),
    )
    os.kill(os.getpid(), signal.SIGKILL)


def tear(made: Any) -> None:
    """Let ps-0 assign rows of a snapshot without what follows in the same function."""
    copy = made._copies[1]
    count, counted = copy.entry.count, list[Any]()

    def once(writes: Any) -> Any:
        counted.append(writes)
        return count(writes) if len(counted) == 1 else None

    copy.entry.count = once
    copy._make_functions()
    copy._assign_whole(copy._read_whole())


if __name__ == "__main__":
    main()
