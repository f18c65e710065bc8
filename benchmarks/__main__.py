"""`make bench`: runs the speed comparisons, prints a table and writes `build/bench.json`.

`python -m benchmarks files same-xla` runs only the named comparisons. Accuracy comparisons
(`same-...`) run only if they are named.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import (
    accuracy,
    checkpoint_parts,
    comparisons,
    dense_tables,
    evaluation,
    examples,
    growing_tables,
    handout,
    large_tables,
    memory,
    on_gpu,
    preparing,
    reading,
    same_accuracy,
    startup,
    storage,
    table_files,
    training,
    whole_run,
)
from benchmarks.baselines import mnist
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError

OUTPUT = Path("build/bench.json")
MEASURES: Mapping[str, Callable[[], comparisons.Comparison | list[comparisons.Comparison]]] = {
    "async": training.asynchronous,
    "sync": training.synchronous,
    "local": training.local_steps,
    "single": training.one_process,
    "single-xla": training.one_process_compiled,
    "accuracy": accuracy.time_to_accuracy,
    "input": examples.first_epoch,
    "input-later": examples.later_epochs,
    "table-input": reading.table_input,
    "prepare": preparing.preparing,
    "prepare-tables": table_files.preparing_tables,
    "run": whole_run.whole_run,
    "startup": startup.startup,
    "handout": handout.handed_out,
    "memory": memory.memory,
    "table-memory": memory.table_memory,
    "files": storage.many_files,
    "checkpoints": storage.checkpoints,
    "checkpoint-parts": checkpoint_parts.checkpoint_parts,
    "evaluation": evaluation.evaluation,
    "table-rows": growing_tables.table_rows,
    "gpu": on_gpu.on_gpu,
    "tables": large_tables.large_tables,
    "same-tables": dense_tables.same_tables,
    **{f"same-{name}": partial(same_accuracy.same_accuracy, name) for name in same_accuracy.PATHS},
}
# Comparisons with this prefix run only on request, because accuracy does not depend on the machine.
OF_ACCURACY = "same-"
# These comparisons do not need the MNIST files.
WITHOUT_MNIST = {
    "run",
    "startup",
    "handout",
    "memory",
    "table-memory",
    "files",
    "checkpoints",
    "checkpoint-parts",
    "evaluation",
    "tables",
    "same-tables",
    "table-rows",
}


def main() -> None:
    """Run the comparisons one after another, and continue if one fails."""
    words = _words()
    found: list[comparisons.Comparison] = []
    failed: list[str] = []
    _write(found)
    try:
        for word in words:
            sys.stderr.write(f"{word} ...\n")
            try:
                measured = MEASURES[word]()
                found += measured if isinstance(measured, list) else [measured]
            except RunInterruptedError:
                raise KeyboardInterrupt from None
            except (UserError, RuntimeError, subprocess.CalledProcessError) as error:
                failed.append(f"{word} has failed: {error}")
                sys.stderr.write(f"{failed[-1]}\n")
            _write(found)
    except KeyboardInterrupt:
        failed.append(f"interrupted; the results so far are in {OUTPUT}")
    sys.stdout.write(comparisons.table(found) + "\n")
    if failed:
        sys.exit("\n".join(f"bench: {each}" for each in failed))


def _write(found: list[comparisons.Comparison]) -> None:
    try:
        comparisons.write(found, OUTPUT)
    except OSError as error:
        sys.exit(f"bench: cannot write {OUTPUT}: {error.strerror}; free some space")


def _words() -> list[str]:
    words = sys.argv[1:] or [each for each in MEASURES if not each.startswith(OF_ACCURACY)]
    for word in words:
        if word not in MEASURES:
            sys.exit(f"bench: there is no comparison {word!r}; it must be {' or '.join(MEASURES)}")
    if words == ["gpu"] and not on_gpu.present():
        sys.exit("bench: this machine has no GPU")
    if "gpu" in words and not on_gpu.present():
        words.remove("gpu")
        sys.stderr.write("gpu: skipped, because this machine has no GPU\n")
    if not WITHOUT_MNIST.issuperset(words):
        mnist.require()
    return words


if __name__ == "__main__":
    main()
