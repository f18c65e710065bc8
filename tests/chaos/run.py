"""Runs a whole pipeline with faults, and resumes it until its model is blessed."""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.events import Progress
from tests.chaos.faults import MissedError, Target, inject, lie_of
from tests.chaos.followed import FLOTILLA, events_of
from tests.chaos.invariants import KILLED, Outcome
from tests.chaos.plan import OUTAGES, Fault, Plan
from tests.chaos.stores import Store
from tests.kubernetes.cluster import shared
from tests.pipelines.called import processes_of

SECONDS_TO_NOTICE = 30
# A function name instead of an import, because an import would load Keras.
LIAR = "tests.chaos.liar:mlp"
# Roles whose loss costs no steps, by strategy.
SPARED = {
    "async_parameter_server": ("worker", "evaluator"),
    "sync_parameter_server": ("worker", "evaluator"),
}
Say = Callable[[str], None]


def run_plan(plan: Plan, folder: Path, say: Say, store: Store) -> Outcome:
    """Run a plan below `folder`, reusing the dataset of other runs there."""
    return Run(plan, folder, say, store, store.variables).to_its_end()


class Run:
    """A run on this machine; subclasses define how faults are injected and what may remain."""

    def __init__(
        self, plan: Plan, folder: Path, say: Say, store: Store, variables: Mapping[str, str]
    ) -> None:
        self._plan = plan
        self._workdir = folder / f"run-{plan.seed}"
        self._read: dict[Path, int] = {}
        self._store = store
        self._say = say
        self._faults = list(plan.faults)
        self._found = Outcome(
            checkpoints="",
            steps=plan.steps,
            every=plan.every,
            by_parts=plan.by_parts,
            tables=plan.tables,
            halfway=plan.halfway,
        )
        self._environment = {**os.environ, **variables}
        # Exit codes of a try after which the run is resumed.
        self._resumable: tuple[int, ...] = (1, KILLED)

    def to_its_end(self) -> Outcome:
        """Start the run, and resume it as long as its failures may be due to a fault."""
        root = self._store.root
        # Each run has a unique name, because models of the same name would be compared with each
        # other.
        own = {"name": f"chaos-{self._plan.seed}", "storage.root": root}
        if self._plan.exits_early:
            lie = json.dumps({"lie": str(lie_of(self._workdir)), "hidden_units": [100]})
            own |= {"model.name": LIAR, "model.args": lie}
        settings = {**self._plan.settings(), **own}
        options = [f"--set={name}={value}" for name, value in settings.items()]
        options.append(f"--set={shared(self._workdir.parent)}")
        arguments = [*self._plan.command, "--workdir", str(self._workdir), *options]
        self._tried(arguments)
        (config,) = self._workdir.glob("*/config.json")
        run_id = config.parent.name
        self._found.checkpoints = storage.join(root, run_id, "checkpoints")
        for _ in self._plan.faults:
            if self._found.ends[-1][0] not in self._resumable:
                break
            self._tried([*arguments, "--resume", run_id])
        self._store.open()
        return self._found

    def _tried(self, arguments: list[str]) -> None:
        """Start or resume the run, inject the faults that are due, and record how it ended."""
        self._workdir.mkdir(parents=True, exist_ok=True)
        errors = self._workdir / "errors.txt"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [*FLOTILLA, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=self._environment,
            )
        self._follow(process)
        process.wait()
        text = errors.read_text(encoding="utf-8", errors="replace")
        last = [line for line in text.splitlines() if line.startswith("flotilla: ")]
        self._say(f"  exit code {process.returncode}{f': {last[0]}' if last else ''}")
        found = self._found
        found.tracebacks += text.count("Traceback")
        found.ends.append((process.returncode, " | ".join(last)))
        found.left += self._left()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        target = None
        for event in events_of(process, self._workdir, self._read):
            self._found.events.append(event)
            if isinstance(event, Progress):
                target = target or self._aim(process)
                self._inject(target, event.global_step)
        if target:
            target.cancel()
            self._found.torn |= target.torn

    def _inject(self, target: Any, step: int) -> None:
        while self._faults and step >= self._faults[0].step:
            fault = self._faults.pop(0)
            try:
                words = self._strike(fault, target)
                self._found.struck.append(fault.kind)
            except MissedError as missed:
                words = str(missed)
            self._say(f"  {fault}: {words}")

    def _aim(self, process: subprocess.Popen[bytes]) -> Any:
        """Return the object into which faults are injected; it has `cancel` and `torn`."""
        (config,) = self._workdir.glob("*/config.json")
        return Target(config.parent, self._store, random.Random(self._plan.seed), process)

    def _strike(self, fault: Fault, target: Any) -> str:
        self._found.losses += _attempts_lost(self._plan, fault)
        self._found.kills += fault.kind == "kill launcher"
        return inject(fault, target)

    def _left(self) -> list[str]:
        """Return the processes that remain.

        If the command line was killed, they get time to exit.
        """
        is_killed = self._found.ends[-1][0] == KILLED
        deadline = time.monotonic() + (SECONDS_TO_NOTICE if is_killed else 0)
        while processes_of(self._workdir) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(each.cmdline()) for each in processes_of(self._workdir)]


def _attempts_lost(plan: Plan, fault: Fault) -> int:
    if fault.kind == "pause" or fault.kind in OUTAGES:
        return 0
    spared = SPARED.get(plan.strategy, ("evaluator",))
    lost = [task for task in fault.tasks() if task.partition("-")[0] not in spared]
    return len(lost) if fault.tasks() else 1


def forget(folder: Path, seed: int) -> None:
    shutil.rmtree(folder / f"run-{seed}", ignore_errors=True)
