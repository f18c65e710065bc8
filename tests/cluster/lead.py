"""Runs a strategy under test: `python -m tests.cluster.lead SPEC` (a `Trial` as JSON)."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config
from flotilla.trainer.runtime import signals
from flotilla.trainer.strategies.strategy import Strategy, create
from tests.cluster.servers import WORDS


def say(**words: Any) -> None:
    """Write a line for the test to the file descriptor in WORDS, or to standard output."""
    with os.fdopen(int(os.environ.get(WORDS, "1")), "w", closefd=False) as lines:
        lines.write(json.dumps(words) + "\n")


def begin() -> tuple[dict[str, Any], Strategy]:
    """Return the specification of this process, and the strategy of its section `config`."""
    signals.end_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "TF_CONFIG" in os.environ:
        cluster, task = from_tf_config(os.environ["TF_CONFIG"])
    else:
        cluster, task = Cluster(addresses={}), Task(role="chief", index=0)
    return spec, create(parse_config(spec["config"]), cluster, task)


def main() -> None:
    spec, strategy = begin()
    module, _, name = spec["problem"].partition(":")
    problem = getattr(importlib.import_module(module), name)(**spec["arguments"])
    strategy.begin_visits(problem.stream)
    strategy.build(problem)
    variables = strategy.variables()
    for path, value in spec["start"].items():
        variables[path].assign(value)
    strategy.refresh()
    for steps in spec["runs"]:
        report = strategy.run(steps)
        say(loss=report.loss, metrics=report.metrics, global_step=strategy.global_step())
    values = {path: variable.numpy().tolist() for path, variable in variables.items()}
    say(
        global_step=strategy.global_step(),
        variables=values,
        devices={path: variable.device for path, variable in variables.items()},
        learning_rate=strategy.learning_rate(),
        totals=strategy.totals(problem).tolist() if spec["measured"] else [],
    )
    strategy.close()


if __name__ == "__main__":
    main()
