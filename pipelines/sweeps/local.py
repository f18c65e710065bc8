"""A sweep on this machine: each trial is a run, of which only the best is promoted.

A sweep is a folder with `sweep.json`, `sweep.html` and a lock. Its trials are ordinary runs next to
it, which train and validate. Of the best the same run goes on: through evaluation on the test
split, gate, export and registry.

All that is known of a sweep is changed in one thread; the threads of the trials only wait for
their runs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from components.table import maker_of
from pipelines.runs import local, local_status
from pipelines.runs.outcome import RunResult
from pipelines.sweeps.plan import SweepOptions, planned
from trainer.cluster.signals import on_interrupt
from trainer.errors import DONE, FAILED, INTERRUPTED, REFUSED, ConfigError, UserError, nearest
from trainer.events import Event, StepEnd
from trainer.sweeps import state, sweep_page
from trainer.sweeps import trial as trials
from trainer.sweeps.state import Sweep
from trainer.sweeps.trial import Trial, best_of, next_job, value_of

OnTrial = Callable[[Sweep, Trial], None]
# How long a request to stop may wait until it is passed on.
LOOK_SECONDS = 0.2
_CODES = {"blessed": DONE, "done": DONE, "unchanged": DONE, "refused": REFUSED}


@dataclass(kw_only=True)
class LocalSweep:
    """A sweep on this machine; `lock` is a file that is locked until it, or this process, ends."""

    workdir: Path
    folder: Path
    sweep: Sweep
    lock: int

    def save(self, sweep: Sweep) -> None:
        """Keep what is known now, and write the page of it; raises `UserError`."""
        self.sweep = sweep
        state.write(sweep, self.folder)
        # What is kept above is what counts.
        with suppress(OSError):
            sweep_page.write(sweep, self.folder / sweep_page.PAGE)

    def close(self) -> None:
        """Let another process resume it."""
        os.close(self.lock)


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended; `promoted` is the run of the best trial, None where there was none."""

    sweep: Sweep
    status: str
    exit_code: int
    message: str
    promoted: RunResult | None = None


def start(options: SweepOptions, workdir: Path) -> LocalSweep:
    """Lay out a new sweep below `workdir`; raises `UserError`."""
    local.require_current_folder()
    sweep = planned(options)
    folder = workdir.absolute() / sweep.sweep_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose another --workdir"
        ) from None
    begun = LocalSweep(workdir=workdir, folder=folder, sweep=sweep, lock=_locked(folder))
    begun.save(sweep)
    return begun


def resumed(sweep_id: str, workdir: Path) -> LocalSweep:
    """Return a sweep that is to go on where it was; what failed is tried again.

    Raises:
        ConfigError: there is no such sweep, or it is still running.
    """
    local.require_current_folder()
    folder = workdir.absolute() / sweep_id
    if Path(sweep_id).name != sweep_id or not (folder / state.FILE).exists():
        known = _sweeps(workdir)
        newest = f" (there is {', '.join(known[-3:])})" if known else ""
        raise ConfigError(
            f"no sweep {sweep_id!r} below {workdir}{nearest(sweep_id, known) or newest}"
        )
    lock = _locked(folder)
    try:
        sweep = state.read(folder)
    except UserError:
        os.close(lock)
        raise
    if sweep.verdict not in _CODES:
        again = (trials.RUNNING, trials.FAILED, trials.INTERRUPTED)
        every = tuple(
            replace(each, status=trials.INTERRUPTED, error="") if each.status in again else each
            for each in sweep.trials
        )
        sweep = replace(sweep, trials=every, verdict="", message="")
    return LocalSweep(workdir=workdir, folder=folder, sweep=sweep, lock=lock)


def execute(begun: LocalSweep, parallel: int, on_trial: OnTrial | None = None) -> SweepResult:
    """Train all trials, and promote the best one.

    In the main thread SIGINT and SIGTERM end it: each run that trains publishes a last checkpoint.
    A second one ends them at once.

    Args:
        begun: the sweep.
        parallel: trials at a time.
        on_trial: called with each trial that begins or ends, in this thread.

    Raises:
        UserError: what is known of the sweep cannot be kept, or its metric is not measured.
    """
    if begun.sweep.verdict in _CODES:
        sweep = begun.sweep
        return _result(sweep, sweep.verdict, _CODES[sweep.verdict], sweep.message)
    on_trial = on_trial or (lambda _sweep, _trial: None)
    # Once the best is chosen, none of the others is trained any more.
    if not begun.sweep.best:
        was_interrupted = _Workers(begun, parallel, on_trial).train()
        if was_interrupted:
            return _result(begun.sweep, "interrupted", INTERRUPTED, "the sweep was interrupted")
    best = begun.sweep.chosen or best_of(begun.sweep.trials, begun.sweep.objective)
    if best is None:
        first = next(each for each in begun.sweep.trials if each.error)
        count = len(begun.sweep.trials)
        message = f"all {count} trials failed; trial {first.number}: {first.error}"
        begun.save(replace(begun.sweep, verdict="failed", message=message))
        return _result(begun.sweep, "failed", FAILED, message)
    return _promoted(begun, best)


def _promoted(begun: LocalSweep, best: Trial) -> SweepResult:
    """Let the run of the best trial go on to its promotion."""
    begun.save(replace(begun.sweep, best=best.number))
    sweep, rung = begun.sweep, best.last.rung if best.last else 0
    config = sweep.config_on(best, rung, sweep.base)
    run = local.execute(local.new_run(config, begun.workdir, best.run_id), "run", {})
    if run.status != "interrupted":
        sweep = replace(
            begun.sweep, verdict=run.status, message=run.message, test=dict(run.metrics)
        )
        begun.save(sweep)
    return _result(begun.sweep, run.status, run.exit_code, run.message, run)


def _result(
    sweep: Sweep, status: str, code: int, message: str, run: RunResult | None = None
) -> SweepResult:
    return SweepResult(sweep=sweep, status=status, exit_code=code, message=message, promoted=run)


def _sweeps(workdir: Path) -> list[str]:
    with suppress(OSError):
        return sorted(path.parent.name for path in workdir.glob(f"*/{state.FILE}"))
    return []


def _locked(folder: Path) -> int:
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"sweep {folder.name} is still running; wait for its end, or interrupt it"
        ) from None
    return lock


class _Workers:
    """Trains trials, so many at a time, until none is left or a request to stop comes."""

    def __init__(self, begun: LocalSweep, parallel: int, on_trial: OnTrial) -> None:
        self._begun, self._parallel, self._on_trial = begun, parallel, on_trial
        self._running: dict[Future[RunResult], int] = {}
        # Two at once would both download and convert the same dataset.
        self._preparing = threading.Lock()
        self._requests = 0
        self._passed_on: dict[str, int] = {}

    def train(self) -> bool:
        """Train; return whether it was interrupted."""
        with ThreadPoolExecutor(self._parallel) as pool, on_interrupt(self._interrupt):
            try:
                self._begin(pool)
                while self._running:
                    self._wait()
                    self._begin(pool)
            finally:
                was_interrupted = bool(self._requests)
                # What ends the loop ends the trials as well.
                self._requests = self._requests or 1
                while self._running:
                    self._wait(keep=False)
        return was_interrupted

    def _interrupt(self) -> None:
        self._requests += 1

    def _begin(self, pool: ThreadPoolExecutor) -> None:
        while len(self._running) < self._parallel and not self._requests:
            sweep = self._begun.sweep
            job = next_job(sweep.trials, sweep.rungs, sweep.objective)
            if job is None:
                return
            trial, rung = job
            trial = replace(trial, status=trials.RUNNING, rung=rung, error="")
            self._save(trial)
            self._running[pool.submit(self._run, trial, rung)] = trial.number

    def _run(self, trial: Trial, rung: int) -> RunResult:
        """Train a trial to the steps of a rung, in a thread of its own."""
        self._preparing.acquire()
        is_held = True

        def prepared() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._preparing.release()

        def hear(event: Event) -> None:
            if isinstance(event, StepEnd) and event.step == maker_of("dataset").name:
                prepared()

        try:
            if self._requests:
                return RunResult(status="interrupted", exit_code=INTERRUPTED, message="", steps=())
            sweep = self._begun.sweep
            config = sweep.config_on(trial, rung, sweep.base)
            run = local.new_run(config, self._begun.workdir, trial.run_id)
            return local.execute(run, "train", {}, hear)
        except UserError as error:
            return RunResult(
                status="failed", exit_code=error.exit_code, message=str(error), steps=()
            )
        finally:
            prepared()

    def _wait(self, *, keep: bool = True) -> None:
        ended, _ = wait(self._running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
        for future in ended:
            number = self._running.pop(future)
            if keep:
                self._ended(number, future.result())
        if self._requests:
            self._pass_on()

    def _ended(self, number: int, result: RunResult) -> None:
        sweep = self._begun.sweep
        trial = next(each for each in sweep.trials if each.number == number)
        metrics = result.metrics_of("checkpoint")
        known = replace(
            trial,
            seconds=trial.seconds + sum(each.seconds for each in result.steps),
            metrics=metrics or trial.metrics,
            checkpoint=result.artifacts.get("checkpoint", trial.checkpoint),
            error=result.message,
        )
        if result.status == "done":
            value = value_of(metrics, sweep.objective)
            steps = sweep.config_on(trial, trial.rung, sweep.base).training.steps
            self._save(sweep.reached(known, trial.rung, steps, value))
        elif result.status == "interrupted" and self._requests:
            self._save(replace(known, status=trials.INTERRUPTED, error=""))
        else:
            # One that someone cancelled would be begun again for ever.
            error = known.error or f"its run ended as {result.status}"
            self._save(replace(known, status=trials.FAILED, error=error))

    def _save(self, trial: Trial) -> None:
        self._begun.save(self._begun.sweep.with_trial(trial))
        self._on_trial(self._begun.sweep, trial)

    def _pass_on(self) -> None:
        """Ask each run that still trains to end: at the second request at once."""
        number = signal.SIGTERM if self._requests == 1 else signal.SIGKILL
        for each in self._begun.sweep.trials:
            if each.number not in self._running.values():
                continue
            # A second SIGTERM would end the upload of the last checkpoint.
            if self._passed_on.get(each.run_id) == number:
                continue
            process = local_status.process_of((self._begun.workdir / each.run_id).absolute())
            if process:
                with suppress(ProcessLookupError):
                    os.killpg(process, number)
                self._passed_on[each.run_id] = number
