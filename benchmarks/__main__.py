"""`make bench`: measure all figures, print a table, write `build/bench.json`.

`python -m benchmarks files` measures the figure of this name alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import (
    accuracy,
    evaluation,
    examples,
    figures,
    memory,
    on_gpu,
    preparing,
    same_accuracy,
    storage,
    training,
    whole_run,
)
from benchmarks.baselines import mnist
from trainer.errors import RunInterruptedError, UserError

OUTPUT = Path("build/bench.json")
MEASURES: Mapping[str, Callable[[], figures.Figure]] = {
    "async": training.asynchronous,
    "sync": training.synchronous,
    "local": training.local_steps,
    "single": training.one_process,
    "accuracy": accuracy.time_to_accuracy,
    "input": examples.first_epoch,
    "input-later": examples.later_epochs,
    "prepare": preparing.preparing,
    "run": whole_run.whole_run,
    "memory": memory.memory,
    "files": storage.many_files,
    "checkpoints": storage.checkpoints,
    "evaluation": evaluation.evaluation,
    "gpu": on_gpu.on_gpu,
    **{f"same-{name}": partial(same_accuracy.same_accuracy, name) for name in same_accuracy.PATHS},
}


def main() -> None:
    """Measure one figure after the other."""
    words = sys.argv[1:] or list(MEASURES)
    for word in words:
        if word not in MEASURES:
            sys.exit(f"bench: there is no figure {word!r}; it has to be {' or '.join(MEASURES)}")
    if "gpu" in words and not on_gpu.present():
        words.remove("gpu")
        sys.stderr.write("gpu: left out, as this machine has no GPU\n")
    mnist.require()
    found: list[figures.Figure] = []
    for word in words:
        sys.stderr.write(f"{word} ...\n")
        found.append(_measured(word))
        figures.write(found, OUTPUT)
    sys.stdout.write(figures.table(found) + "\n")


def _measured(word: str) -> figures.Figure:
    try:
        return MEASURES[word]()
    except (KeyboardInterrupt, RunInterruptedError):
        sys.exit(f"bench: {word} was interrupted; what was measured before stands in {OUTPUT}")
    except (UserError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench: {word} has failed: {error}; what was measured before stands in {OUTPUT}")


if __name__ == "__main__":
    main()
