"""The state of a sweep on this machine: a study of Optuna, in a journal in its folder.

What Optuna does not know of a trial, such as its run, is an attribute of it. A trial that failed or
was interrupted still runs for Optuna until the end of the sweep: `--resume` tries it again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import json_to_distribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState

from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse_record, tree_of
from flotilla.trainer.sweeps.space import make_settings, to_parameters
from flotilla.trainer.sweeps.sweep import (
    FAILED,
    INTERRUPTED,
    REDUCTION,
    RUNNING,
    Result,
    Sweep,
    Trial,
)

FILE = "sweep.journal"
#: That of an earlier version, which is not read any more.
OLD_FILE = "sweep.json"
# TPE draws the first trials at random: a fourth of them, and so many at most.
_MOST_RANDOM = 10
_PLAN, _END, _TRIAL = "plan", "end", "trial"
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """A sweep that is worked on; every method raises `UserError` where the journal is not kept."""

    def __init__(self, folder: Path, plan: Sweep | None = None) -> None:
        """Lay out the planned sweep, or go on with the one of this folder; raises `ConfigError`."""
        self.folder, self.workdir, self._path = folder, folder.parent, folder / FILE
        self._lock = _locked(folder)
        try:
            self._begin(plan)
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Let another process resume it."""
        os.close(self._lock)

    def _begin(self, plan: Sweep | None) -> None:
        with self._kept():
            if plan:
                self._storage = _storage(self._path)
                self._study = _created(self._storage, plan)
            else:
                _repair(self._path)
                self._storage, self._study = _opened(self.folder)
        self._plan = _plan_of(self._study, self.folder)
        self._space = {key: json_to_distribution(each) for key, each in self._plan.space.items()}
        self._asked: dict[int, optuna.Trial] = {}
        with self._kept():
            self._configure()
            for each in () if plan else self._study.get_trials(states=[TrialState.RUNNING]):
                self._wait_again(each)

    @property
    def sweep(self) -> Sweep:
        """The sweep so far."""
        return _sweep_of(self._study, self._plan)

    def begin(self) -> Trial | None:
        """Return the next trial to train: one that waits, or one that is sampled; None: no more."""
        trials = self._study.get_trials(deepcopy=False)
        is_waiting = any(each.state == TrialState.WAITING for each in trials)
        if not is_waiting and len(trials) == len(self._plan.trials):
            return None
        with self._kept():
            asked = self._study.ask(self._space)
            self._asked[asked.number + 1] = asked
            known = parse_record(Trial, asked.user_attrs.get(_TRIAL))
            trial = known or replace(
                self._plan.trials[asked.number], settings=make_settings(self._space, asked.params)
            )
            self.keep(trial)
        return trial

    def keep(self, trial: Trial) -> None:
        """Keep what has become of a trial."""
        with self._kept():
            self._asked[trial.number].set_user_attr(_TRIAL, tree_of(trial))

    def _directed(self, result: Result) -> float:
        """Return a value that is better in the direction of the study."""
        is_higher = self._study.direction == StudyDirection.MAXIMIZE
        return -result.by.rank(result.value) if is_higher else result.by.rank(result.value)

    def goes_on(self, trial: Trial, result: Result) -> bool:
        """Report what a trial has reached; return whether it goes on, else it has ended."""
        asked, is_last = self._asked[trial.number], result.rung == len(self._plan.rungs) - 1
        with self._kept():
            known = self._study.get_trials(deepcopy=False)[asked.number].intermediate_values
            if result.steps not in known:
                asked.report(self._directed(result), result.steps)
            if is_last:
                self._study.tell(asked, self._directed(result))
            elif asked.should_prune():
                self._study.tell(asked, state=TrialState.PRUNED)
            else:
                return True
        return False

    def choose(self, best: Trial) -> None:
        """Keep which trial is the best: none of the others is trained any more."""
        self._end(best=best.number)

    def end(self, verdict: str, message: str, test: dict[str, Any]) -> None:
        """Keep how the sweep ended."""
        self._end(verdict=verdict, message=message, test=test)
        if self.sweep.best:
            for each in self._study.get_trials(states=[TrialState.RUNNING]):
                self._study.tell(each.number, state=TrialState.FAIL)

    def _end(self, **more: Any) -> None:
        with self._kept():
            self._study.set_user_attr(_END, {**self._study.user_attrs.get(_END, {}), **more})

    def _wait_again(self, frozen: optuna.trial.FrozenTrial) -> None:
        study = self._storage.get_study_id_from_name(self._study.study_name)
        key = self._storage.get_trial_id_from_study_id_trial_number(study, frozen.number)
        known = parse_record(Trial, frozen.user_attrs.get(_TRIAL))
        if known and known.status in (RUNNING, FAILED):
            again = replace(known, status=INTERRUPTED, error="")
            self._storage.set_trial_user_attr(key, _TRIAL, tree_of(again))
        self._storage.set_trial_state_values(key, TrialState.WAITING)

    def _configure(self) -> None:
        count, rungs = len(self._plan.trials), self._plan.rungs
        # Of one seed alone a resumed sweep would draw again what it has drawn.
        seed = self._plan.seed + len(self._study.get_trials(deepcopy=False))
        sampler: BaseSampler = RandomSampler(seed)
        if self._plan.sampler == "tpe":
            sampler = TPESampler(n_startup_trials=min(_MOST_RANDOM, max(count // 4, 2)), seed=seed)
        self._study.sampler = sampler
        self._study.pruner = (
            optuna.pruners.SuccessiveHalvingPruner(rungs[0], REDUCTION)
            if len(rungs) > 1
            else optuna.pruners.NopPruner()
        )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; what the trials published is kept"
            ) from None


def _locked(folder: Path) -> int:
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
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


def read(folder: Path) -> Sweep:
    """Return the sweep of a folder; raises `ConfigError` where there is none, or it is damaged."""
    study = _opened(folder)[1]
    return _sweep_of(study, _plan_of(study, folder))


def _created(storage: JournalStorage, plan: Sweep) -> optuna.Study:
    # Of the main metric of the trials the direction is not known yet.
    is_higher = plan.objective.better == "higher"
    direction = StudyDirection.MAXIMIZE if is_higher else StudyDirection.MINIMIZE
    study = optuna.create_study(study_name=plan.sweep_id, storage=storage, direction=direction)
    study.set_user_attr(_PLAN, tree_of(plan))
    space = {key: json_to_distribution(each) for key, each in plan.space.items()}
    for trial in plan.trials:
        if trial.settings:
            more = {_TRIAL: tree_of(trial)}
            study.enqueue_trial(to_parameters(space, trial.settings), user_attrs=more)
    return study


def _opened(folder: Path) -> tuple[JournalStorage, optuna.Study]:
    path = folder / FILE
    if (folder / OLD_FILE).exists() and not path.exists():
        raise ConfigError(
            f"sweep {folder.name} was begun by an earlier version of Flotilla, whose {OLD_FILE} "
            "cannot be resumed: start another sweep; the runs of its trials are kept"
        )
    if not path.is_file():
        raise ConfigError(f"no sweep {folder.name!r} below {folder.parent}")
    try:
        storage = _storage(path)
        return storage, optuna.load_study(study_name=None, storage=storage)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise _damaged(folder) from None


def _plan_of(study: optuna.Study, folder: Path) -> Sweep:
    if plan := parse_record(Sweep, study.user_attrs.get(_PLAN)):
        return plan
    raise _damaged(folder)


def _sweep_of(study: optuna.Study, plan: Sweep) -> Sweep:
    frozen = study.get_trials(deepcopy=False)
    known = [parse_record(Trial, each.user_attrs.get(_TRIAL)) for each in frozen]
    asked = {each.number: each for each in known if each}
    trials = tuple(asked.get(each.number, each) for each in plan.trials)
    return replace(plan, trials=trials, **study.user_attrs.get(_END, {}))


def _damaged(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder / FILE} is damaged: start another sweep; the runs of its trials are kept"
    )


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))


def _repair(path: Path) -> None:
    """Remove what a killed process leaves: its lock of the journal, and a line cut short."""
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
