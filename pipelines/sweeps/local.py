"""A sweep on this machine, in which each trial is a run and only the best one is promoted.

The folder of a sweep contains the journal of a study and a lock. Next to it, each trial has a run,
which only trains and validates. The run of the best trial continues to the registry. Only one
thread changes the state of the sweep.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import yaml

from flotilla.components.table import find_maker
from flotilla.pipelines import notebook
from flotilla.pipelines.runs import local, local_status
from flotilla.pipelines.runs.local import GivenConfig
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.pipelines.settings import Sections, Settings, format_search, make_assignments
from flotilla.pipelines.sweeps import SweepOptions, plan_sweep
from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.events import Event, StepEnd
from flotilla.trainer.runtime.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    REFUSED,
    ConfigError,
    UserError,
    nearest,
)
from flotilla.trainer.runtime.signals import handle_interrupts
from flotilla.trainer.sweeps import page
from flotilla.trainer.sweeps import sweep as trials
from flotilla.trainer.sweeps.study import FILE, OLD_FILE, Study
from flotilla.trainer.sweeps.sweep import (
    Sweep,
    Trial,
    find_best,
    find_objective,
    make_config,
    make_table,
)
from flotilla.trainer.tracking.tracker import LocalRun

OnTrial = Callable[[Sweep, Trial], None]
OnEvent = Callable[[Trial, Event], None]
# Maximum time until a stop request reaches the trials, in seconds.
LOOK_SECONDS = 0.2
#: The file with the configuration of the best trial, in the folder of a sweep.
BEST = "best.yaml"
_CODES = {"blessed": DONE, "done": DONE, "unchanged": DONE, "refused": REFUSED}


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult:
    """The result of a sweep.

    Attributes:
        status: status of the best trial's run, such as `blessed`; or `failed` or `interrupted`.
        exit_code: exit code of the command line.
        message: the reason for a failure in one line, or empty.
        metrics: metrics of the best model on the test split.
        artifacts: URIs of the best run's artifacts, by name.
    """

    sweep: Sweep
    status: str
    exit_code: int
    message: str
    metrics: Mapping[str, Any]
    artifacts: Mapping[str, str]

    @property
    def sweep_id(self) -> str:
        """The id with which to resume the sweep."""
        return self.sweep.sweep_id

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials in the order of their numbers."""
        return self.sweep.trials

    @property
    def best(self) -> Trial | None:
        """The best trial by validation, or None until it is chosen."""
        return self.sweep.chosen

    def __repr__(self) -> str:
        """Return the sweep, its status and its best trial."""
        best = f"best {dict(self.best.settings)}" if self.best else ""
        return notebook.short("SweepResult", self.sweep_id, self.status, best)

    def _repr_html_(self) -> str:
        return notebook.table(f"sweep {self.sweep_id}: {self.status}", *make_table(self.sweep))


def sweep(
    config: GivenConfig = None,
    search: Settings = (),
    *,
    settings: Settings = (),
    random: int | None = None,
    tpe: int | None = None,
    seed: int | None = None,
    halving: bool = False,
    auto: bool = False,
    minutes: float | None = None,
    metric: str = "",
    better: str = "",
    parallel: int = 1,
    workdir: str | Path = "runs",
    resume: str | None = None,
    on_trial: OnTrial | None = None,
    **sections: Unpack[Sections],
) -> SweepResult:
    """Train trials with different settings, choose the best by validation, and promote it.

    Args:
        config: the configuration of all trials, together with `settings` and `sections`; see `run`.
        search: for each key, a list of values, or a range such as `0.001..0.1` or `0.001..0.1:log`.
        settings: settings that override the configuration.
        random: number of trials to draw at random. By default, the whole grid is tried.
        tpe: number of trials that TPE chooses, each from the results of earlier ones.
        seed: seed of `random` and `tpe`.
        halving: whether only the best third of the trials continues from each rung to the next.
        auto: whether to search a predefined space, with TPE and, if possible, halving.
        minutes: time limit. After it, running trials are stopped and the best one is promoted.
        metric: validation metric by which trials are compared. By default, the main metric.
        better: which values of `metric` are better: `higher` or `lower`.
        parallel: number of concurrent trials.
        workdir: the folder to which everything is written.
        resume: id of a sweep to resume.
        on_trial: called with the sweep and a trial, when the trial starts and ends.

    Example:
        flotilla.sweep("configs/digits.yaml", {"training.batch_size": [32, 64]}).best.settings
    """
    options = SweepOptions(
        config=config, settings=(*make_assignments(settings, sections), *format_search(search)),
        random=random, tpe=tpe, seed=seed, halving=halving, auto=auto, minutes=minutes,
        metric=metric, better=better, parallel=parallel,
    )  # fmt: skip
    with closing(begin(options, Path(workdir), resume)) as begun:
        run = execute(begun, parallel, on_trial)
        return make_result(begun.sweep, run)


def make_result(sweep: Sweep, run: RunResult) -> SweepResult:
    """Return the result of a sweep, given the run of its best trial."""
    return SweepResult(
        sweep=sweep, status=run.status, exit_code=run.exit_code, message=run.message,
        metrics=dict(sweep.test), artifacts=run.artifacts,
    )  # fmt: skip


def begin(options: SweepOptions, workdir: Path, resume: str | None) -> Study:
    """Create a new sweep below `workdir`, or open the sweep to resume. Raises `UserError`."""
    local.require_current_folder()
    if resume is not None:
        if options != SweepOptions(parallel=options.parallel):
            raise ConfigError(
                "--resume accepts only the options --workdir and --parallel; remove the other "
                "options"
            )
        return _open(resume, workdir)
    sweep = plan_sweep(options)
    folder = workdir.absolute() / sweep.sweep_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose another --workdir"
        ) from None
    return Study(folder, sweep)


def _open(sweep_id: str, workdir: Path) -> Study:
    known = sorted(
        {path.parent.name for each in (FILE, OLD_FILE) for path in workdir.glob(f"*/{each}")}
    )
    if sweep_id not in known:
        newest = f"; existing: {', '.join(known[-3:])}" if known else ""
        raise ConfigError(
            f"no sweep {sweep_id!r} below {workdir}{nearest(sweep_id, known) or newest}"
        )
    return Study(workdir.absolute() / sweep_id)


def execute(
    begun: Study,
    parallel: int,
    on_trial: OnTrial | None = None,
    on_event: OnEvent | None = None,
) -> RunResult:
    """Train all trials and promote the best one. Return the result of its run.

    In the main thread, SIGINT and SIGTERM stop the sweep, and each training run publishes a last
    checkpoint. A second signal kills the runs. `on_trial` is called in this thread with
    each trial, and `on_event` in any thread with each event of a trial's run. Raises `UserError`.
    """
    sweep, hear = begun.sweep, on_event or (lambda _trial, _event: None)
    if sweep.verdict in _CODES:
        return _make_run_result(sweep.verdict, _CODES[sweep.verdict], sweep.message)
    tracked = LocalRun(sweep.base, sweep.sweep_id, begun.folder / local.EVENTS)
    tracked.tag(sweep=sweep.sampler, keys=", ".join(sweep.keys), trials=len(sweep.trials))
    status, message = "interrupted", ""
    try:
        result = _execute(begun, parallel, on_trial or (lambda _sweep, _trial: None), hear)
        status, message = result.status, result.message
    finally:
        if best := begun.sweep.chosen:
            settings = {f"best.{key}": value for key, value in best.settings.items()}
            tracked.tag(best_trial=best.number, best_run=best.run_id, **settings)
        tracked.end(status, message)
    return result


def _execute(begun: Study, parallel: int, on_trial: OnTrial, hear: OnEvent) -> RunResult:
    sweep = begun.sweep
    # Train no trials if the best one was already chosen before the sweep was resumed.
    if not sweep.best:
        was_interrupted = _Workers(begun, parallel, on_trial, hear).train()
        sweep = begun.sweep
        write_best(begun)
        write_page(begun)
        if was_interrupted:
            return _make_run_result("interrupted", INTERRUPTED, "the sweep was interrupted")
    best = sweep.chosen or find_best(sweep.trials, sweep.objective)
    if best is None:
        first = next(each for each in sweep.trials if each.error)
        count = sum(1 for each in sweep.trials if each.error)
        message = f"all {count} trials failed; trial {first.number}: {first.error}"
        begun.end("failed", message, {})
        write_page(begun)
        return _make_run_result("failed", FAILED, message)
    return _promote(begun, best, hear)


def write_best(begun: Study) -> None:
    """Write the configuration of the best trial so far, if there is one, next to the journal."""
    if best := begun.sweep.chosen or find_best(begun.sweep.trials, begun.sweep.objective):
        config = make_config(begun.sweep.base, best.settings).model_dump(mode="json")
        text = f"# Trial {best.number} of {begun.sweep.sweep_id}.\n" + yaml.safe_dump(
            config, sort_keys=False, allow_unicode=True
        )
        storage.write_bytes(storage.uri_of(begun.folder / BEST), text.encode())


def write_page(begun: Study, run: RunResult | None = None) -> None:
    """Write the page of a sweep, including the best trial's run if given. Errors are ignored."""
    best = begun.sweep.chosen
    report = f"../{best.run_id}/report.html" if run and run.report and best else ""
    with suppress(UserError):
        content = page.render(begun.sweep, run.headline if run and best else "", report)
        storage.write_bytes(storage.uri_of(begun.folder / page.PAGE), content)


def _promote(begun: Study, best: Trial, on_event: OnEvent) -> RunResult:
    begun.choose(best)
    config = make_config(begun.sweep.base, best.settings)
    folder = local.new_run(config, begun.workdir, best.run_id)
    run = local.execute(
        replace(folder, parent=begun.sweep.sweep_id), "run", {}, partial(on_event, best)
    )
    if run.status != "interrupted":
        begun.end(run.status, run.message, dict(run.metrics))
    write_page(begun, run)
    return run


def _make_run_result(status: str, code: int, message: str) -> RunResult:
    return RunResult(status=status, exit_code=code, message=message, steps=())


class _Workers:
    """Trains trials in parallel until all are done or a stop is requested."""

    def __init__(self, begun: Study, parallel: int, on_trial: OnTrial, on_event: OnEvent) -> None:
        self._begun, self._parallel = begun, parallel
        self._on_trial, self._on_event = on_trial, on_event
        self._sweep = begun.sweep
        self._running: dict[Future[RunResult], Trial] = {}
        # Trials that have completed a rung and continue to the next one.
        self._going_on: list[Trial] = []
        # Only one trial prepares data at a time. The others then reuse the published dataset.
        self._preparing = threading.Lock()
        self._requests = 0
        minutes = self._sweep.minutes
        self._deadline = time.monotonic() + 60 * minutes if minutes else math.inf
        self._passed_on: dict[str, int] = {}

    def train(self) -> bool:
        """Train all trials. Return whether training was interrupted."""
        with ThreadPoolExecutor(self._parallel) as pool, handle_interrupts(self._interrupt):
            try:
                self._begin(pool)
                while self._running:
                    self._wait()
                    self._begin(pool)
            finally:
                was_interrupted = bool(self._requests)
                # If the loop ends early for any reason, stop the running trials.
                self._requests = self._requests or 1
                while self._running:
                    self._wait(keep=False)
        return was_interrupted

    def _interrupt(self) -> None:
        self._requests += 1

    def _is_over(self) -> bool:
        """Return whether the time limit has passed and at least one trial has ended."""
        return time.monotonic() >= self._deadline and any(
            each.last or each.error for each in self._begun.sweep.trials
        )

    def _begin(self, pool: ThreadPoolExecutor) -> None:
        while len(self._running) < self._parallel and not (self._requests or self._is_over()):
            trial = self._going_on.pop() if self._going_on else self._begun.begin()
            if trial is None:
                return
            trial = replace(trial, status=trials.RUNNING, error="")
            self._keep(trial)
            self._running[pool.submit(self._run, trial)] = trial

    def _run(self, trial: Trial) -> RunResult:
        """Train a trial up to the steps of its rung. Called in a thread of the pool."""
        self._preparing.acquire()
        is_held = True

        def release_preparation() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._preparing.release()

        def hear(event: Event) -> None:
            self._on_event(trial, event)
            if isinstance(event, StepEnd) and event.step == find_maker("dataset").name:
                release_preparation()

        try:
            if self._requests:
                return _make_run_result("interrupted", INTERRUPTED, "")
            config = self._sweep.configure(trial, trial.rung, self._sweep.base)
            run = local.new_run(config, self._begun.workdir, trial.run_id)
            return local.execute(replace(run, parent=self._sweep.sweep_id), "train", {}, hear)
        except UserError as error:
            return _make_run_result("failed", error.exit_code, str(error))
        finally:
            release_preparation()

    def _wait(self, *, keep: bool = True) -> None:
        ended, _ = wait(self._running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
        for future in ended:
            trial = self._running.pop(future)
            if keep:
                self._end(trial, future.result())
        if self._requests or self._is_over():
            self._forward_stop()

    def _end(self, trial: Trial, result: RunResult) -> None:
        step = result.find_step("checkpoint")
        metrics = dict(step.metrics) if step else {}
        known = replace(
            trial,
            seconds=trial.seconds + sum(each.seconds for each in result.steps),
            metrics=metrics or trial.metrics,
            checkpoint=result.artifacts.get("checkpoint", trial.checkpoint),
            error=result.message,
        )
        if result.status == "done":
            self._record_result(known, step.main if step else None)
        elif result.status == "interrupted" and (self._requests or self._is_over()):
            self._keep(replace(known, status=trials.INTERRUPTED, error=""))
        else:
            # Record the failure, because an unfinished trial would be started again and again.
            error = known.error or f"its run ended with the status {result.status}"
            self._keep(replace(known, status=trials.FAILED, error=error))
        write_page(self._begun)

    def _record_result(self, trial: Trial, main: MainMetric | None) -> None:
        """Record a trial's result on its rung, and schedule its next rung if it may continue."""
        trial = self._sweep.add_result(trial, trial.rung, main)
        find_objective([*self._begun.sweep.trials, trial], self._sweep.objective)
        self._keep(trial)
        if trial.last and self._begun.report(trial, trial.last):
            self._going_on.append(replace(trial, rung=trial.rung + 1))

    def _keep(self, trial: Trial) -> None:
        self._begun.keep(trial)
        self._on_trial(self._sweep, trial)

    def _forward_stop(self) -> None:
        """Ask each running trial to stop, or kill it after a second request."""
        number = signal.SIGTERM if self._requests <= 1 else signal.SIGKILL
        for each in self._running.values():
            # Do not repeat SIGTERM, which would stop the upload of the last checkpoint.
            if self._passed_on.get(each.run_id) == number:
                continue
            process = local_status.find_process((self._begun.workdir / each.run_id).absolute())
            if process:
                with suppress(ProcessLookupError):
                    os.killpg(process, number)
                self._passed_on[each.run_id] = number
