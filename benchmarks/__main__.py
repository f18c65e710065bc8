"""`make bench`: measure all figures, print a table, write `build/bench.json`.

`python -m benchmarks files` measures the figure of this name alone.
"""

from __future__ import annotations

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
    preparing,
    same_accuracy,
    storage,
    training,
    whole_run,
)
from benchmarks.baselines import mnist

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
    **{f"same-{name}": partial(same_accuracy.same_accuracy, name) for name in same_accuracy.PATHS},
}


def main() -> None:
    """Measure one figure after the other."""
    words = sys.argv[1:] or list(MEASURES)
    for word in words:
        if word not in MEASURES:
            sys.exit(f"bench: there is no figure {word!r}; it has to be {' or '.join(MEASURES)}")
    mnist.require()
    found = []
    for word in words:
        sys.stderr.write(f"{word} ...\n")
        found.append(MEASURES[word]())
        figures.write(found, OUTPUT)
    sys.stdout.write(figures.table(found) + "\n")


if __name__ == "__main__":
    main()
