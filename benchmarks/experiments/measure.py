"""Runs a configuration through the whole pipeline and collects its results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import mnist
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.config.load import load_config
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.runtime.errors import UserError

# Keep all checkpoints, including the one before the first step.
KEEP_ALL = "training.keep=1000"
# A run that the gate refused has results too.
MEASURED = ("blessed", "refused")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configuration with overridden settings."""

    config: str
    settings: tuple[str, ...] = ()

    def command(self) -> str:
        """Return the command line of the run."""
        words = ["flotilla", "run", self.config]
        return " ".join(words + [f"--set {each}" for each in self.settings])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of a run.

    Attributes:
        accuracy: accuracy on the test split, between 0 and 1.
        loss: mean cross entropy on the test split.
        first_loss: mean cross entropy on the test split before the first step.
        training_loss: mean training loss of all updates.
        last_loss: training loss at the end of training.
        global_step: number of applied updates.
        local_steps: number of gradients computed by all workers; 0 if they are not counted.
        steps_per_second: updates per second, averaged over the whole training.
    """

    accuracy: float
    loss: float
    first_loss: float
    training_loss: float
    last_loss: float
    global_step: int
    local_steps: int
    steps_per_second: float


def measured(run: Run, folder: Path) -> Measured:
    """Return the results of a run. A run that was measured before is read from `folder`.

    Raises:
        UserError: the run failed; its messages are on standard error.
    """
    settings = (*run.settings, f"data.manual_dir={mnist.folder()}", KEEP_ALL)
    kept = folder / f"{load_config(Path(run.config), settings).digest()}.json"
    if kept.exists():
        return Measured(**json.loads(kept.read_text(encoding="utf-8"))["measured"])
    ended = _ended(run, settings, folder / "runs")
    results = _measured(run, settings, ended)
    record = {"command": run.command(), "run": ended["run_id"], "measured": asdict(results)}
    kept.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return results


def _ended(run: Run, settings: tuple[str, ...], workdir: Path) -> dict[str, Any]:
    flotilla = Path(sys.executable).with_name("flotilla")
    words = [str(flotilla), "run", run.config, "--json", "--workdir", str(workdir)]
    for each in settings:
        words += ["--set", each]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    outcome = json.loads((ended.stdout.splitlines() or ["{}"])[-1])
    if outcome.get("status") not in MEASURED:
        raise UserError(f"{run.command()}: exit code {ended.returncode}; see above")
    return dict(outcome)


def _measured(run: Run, settings: tuple[str, ...], ended: dict[str, Any]) -> Measured:
    artifacts = ended["artifacts"]
    checkpoints = artifacts["checkpoint"].rpartition("/")[0]
    rows = read_history(checkpoints)
    reached = [row["global_step"] for row in rows]
    stretches = [after - before for before, after in pairwise([0, *reached])]
    workers = rows[-1].get("workers", {})
    return Measured(
        accuracy=ended["metrics"]["accuracy"],
        loss=ended["metrics"]["loss"],
        first_loss=_first_loss(run, settings, artifacts["dataset"], checkpoints),
        training_loss=float(np.average([row["loss"] for row in rows], weights=stretches)),
        last_loss=rows[-1]["loss"],
        global_step=ended["global_step"],
        local_steps=sum(each["local_steps"] for each in workers.values()),
        steps_per_second=rows[-1]["global_step"] / rows[-1]["seconds"],
    )


def _first_loss(run: Run, settings: tuple[str, ...], dataset: str, checkpoints: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        found = evaluate(
            load_config(Path(run.config), (*settings, "evaluation.baseline=none")),
            dataset,
            storage.join(checkpoints, "step-00000000"),
            (scratch / "evaluation").as_uri(),
            scratch,
        )
    return found.metrics["loss"]
