"""A chief that finds what was left, trains, and dies: `python -m tests.cluster.left`.

Its SPEC is a JSON file: `config` (sections that differ from the defaults), `uri` of the checkpoints
of its run, `saved`, the global step of the newest of them or -1, `layers`, how many the model has
more, and `torn`, whether it dies while it assigns values. A line of JSON says what was found,
whether the step was traced, and what it leaves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tensorflow.python.eager import context

from tests.cluster.lead import say
from tests.cluster.snapshotted import STEPS, described, problem, values_of
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.strategies import placement
from trainer.training.recovery import ServerSnapshots


def main() -> None:
    """Begin as the outer loop does, and die."""
    spec, config, strategy = described()
    # All but the smallest variables have no values before they get those that are on the servers.
    placement.LARGE_BYTES = 64
    checkpoints = Checkpoints(spec["uri"], keep=1, scratch=Path("scratch"))
    snapshots = ServerSnapshots(config, strategy, checkpoints)
    found = snapshots.find(spec["saved"])
    strategy.build(problem(config, layers=spec["layers"]))
    strategy.restored()
    begun = values_of(strategy.variables())
    strategy.settle(is_whole=True)
    strategy.run(STEPS)
    if spec["torn"]:
        strategy.settle(is_whole=False)
    left = values_of(strategy.variables())
    names = context.context().list_function_names()
    say(
        found=found,
        used=snapshots.seconds_since_save() is not None,
        begun={path: each.tolist() for path, each in begun.items()},
        step=strategy.global_step(),
        left={path: each.tolist() for path, each in left.items()},
        metrics=strategy.metrics()["tables"],
        traced=any(each.startswith("__inference_loop") for each in names),
    )
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
