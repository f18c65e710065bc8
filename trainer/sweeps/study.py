"""The local state of a sweep: an Optuna study, whose journal is in the folder of the sweep.

User attributes store what Optuna does not know about a trial, such as its run. A trial that failed
or was interrupted stays `running` in Optuna until the sweep ends, so that `--resume` can retry it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.exceptions import OptunaError
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
#: The state file of earlier versions, which cannot be resumed.
OLD_FILE = "sweep.json"
# TPE first samples a quarter of all trials at random, but at most this many.
_MOST_RANDOM = 10
_PLAN, _END, _TRIAL = "plan", "end", "trial"
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """A running sweep. All methods raise `UserError` if the journal cannot be written."""

    def __init__(self, folder: Path, plan: Sweep | None = None) -> None:
        """Create the planned sweep, or continue the sweep in the folder. Raises `ConfigError`."""
        self.folder, self.workdir, self._path = folder, folder.parent, folder / FILE
        self._lock = _lock(folder)
        try:
            self._begin(plan)
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Release the sweep, so that another process can resume it."""
        os.close(self._lock)

    def _begin(self, plan: Sweep | None) -> None:
        with self._report_errors():
            if plan:
                self._storage = _storage(self._path)
                self._study = _create(self._storage, plan)
            else:
                _repair(self._path)
                self._storage, self._study = _open(self.folder)
        self._plan = _read_plan(self._study, self.folder)
        try:
            self._space = _parse_space(self._plan)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _damage_error(self.folder) from None
        self._asked: dict[int, optuna.Trial] = {}
        with self._report_errors():
            self._configure()
            for each in () if plan else self._study.get_trials(states=[TrialState.RUNNING]):
                self._requeue(each)

    @property
    def sweep(self) -> Sweep:
        """The current state of the sweep."""
        return _read_sweep(self._study, self._plan, self.folder)

    def begin(self) -> Trial | None:
        """Return the next trial to train, or None. A waiting trial comes before a new one."""
        trials = self._study.get_trials(deepcopy=False)
        is_waiting = any(each.state == TrialState.WAITING for each in trials)
        if not is_waiting and len(trials) == len(self._plan.trials):
            return None
        with self._report_errors():
            asked = self._study.ask(self._space)
            self._asked[asked.number + 1] = asked
            known = parse_record(Trial, asked.user_attrs.get(_TRIAL))
            if known is None or known.number != asked.number + 1:
                planned = self._plan.trials[asked.number]
                known = replace(planned, settings=make_settings(self._space, asked.params))
            self.keep(known)
        return known

    def keep(self, trial: Trial) -> None:
        """Store the state of a trial."""
        with self._report_errors():
            self._asked[trial.number].set_user_attr(_TRIAL, tree_of(trial))

    def _sign(self, result: Result) -> float:
        """Return the result's value for Optuna, negated if the study's direction is opposite."""
        is_higher = self._study.direction == StudyDirection.MAXIMIZE
        return -result.by.rank(result.value) if is_higher else result.by.rank(result.value)

    def report(self, trial: Trial, result: Result) -> bool:
        """Report a result on a rung. Return true if the trial continues. Otherwise, end it."""
        asked, is_last = self._asked[trial.number], result.rung == len(self._plan.rungs) - 1
        with self._report_errors():
            known = self._study.get_trials(deepcopy=False)[asked.number].intermediate_values
            if result.steps not in known:
                asked.report(self._sign(result), result.steps)
            if is_last:
                self._study.tell(asked, self._sign(result))
            elif asked.should_prune():
                self._study.tell(asked, state=TrialState.PRUNED)
            else:
                return True
        return False

    def choose(self, best: Trial) -> None:
        """Store the best trial. No trial is trained after that."""
        self._end(best=best.number)

    def end(self, verdict: str, message: str, test: dict[str, Any]) -> None:
        """Store how the sweep ended."""
        self._end(verdict=verdict, message=message, test=test)
        if self.sweep.best:
            for each in self._study.get_trials(states=[TrialState.RUNNING]):
                self._study.tell(each.number, state=TrialState.FAIL)

    def _end(self, **more: Any) -> None:
        with self._report_errors():
            self._study.set_user_attr(_END, {**self._study.user_attrs.get(_END, {}), **more})

    def _requeue(self, frozen: optuna.trial.FrozenTrial) -> None:
        study = self._storage.get_study_id_from_name(self._study.study_name)
        key = self._storage.get_trial_id_from_study_id_trial_number(study, frozen.number)
        known = parse_record(Trial, frozen.user_attrs.get(_TRIAL))
        if known and known.status in (RUNNING, FAILED):
            again = replace(known, status=INTERRUPTED, error="")
            self._storage.set_trial_user_attr(key, _TRIAL, tree_of(again))
        self._storage.set_trial_state_values(key, TrialState.WAITING)

    def _configure(self) -> None:
        count, rungs = len(self._plan.trials), self._plan.rungs
        # With the same seed, a resumed sweep would sample the same values again.
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
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; the published results are kept"
            ) from None


def _lock(folder: Path) -> int:
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"sweep {folder.name} is still running; wait until it ends, or interrupt it"
        ) from None
    return lock


def read(folder: Path) -> Sweep:
    """Return the sweep in a folder. Raises `ConfigError` if it is missing or damaged."""
    study = _open(folder)[1]
    return _read_sweep(study, _read_plan(study, folder), folder)


def _create(storage: JournalStorage, plan: Sweep) -> optuna.Study:
    # The direction of a main metric is not known yet. `Study._sign` negates values if necessary.
    is_higher = plan.objective.better == "higher"
    direction = StudyDirection.MAXIMIZE if is_higher else StudyDirection.MINIMIZE
    study = optuna.create_study(study_name=plan.sweep_id, storage=storage, direction=direction)
    study.set_user_attr(_PLAN, tree_of(plan))
    space = _parse_space(plan)
    for trial in plan.trials:
        if trial.settings:
            more = {_TRIAL: tree_of(trial)}
            study.enqueue_trial(to_parameters(space, trial.settings), user_attrs=more)
    return study


def _open(folder: Path) -> tuple[JournalStorage, optuna.Study]:
    path = folder / FILE
    if (folder / OLD_FILE).exists() and not path.exists():
        raise ConfigError(
            f"sweep {folder.name} cannot be resumed, because an earlier version of Flotilla "
            "started it; start a new sweep (the runs of the old trials are kept)"
        )
    if not path.is_file():
        raise ConfigError(f"there is no sweep {folder.name!r} below {folder.parent}; check the id")
    try:
        storage = _storage(path)
        study = optuna.load_study(study_name=None, storage=storage)
        # Optuna does not check the types of the attributes.
        if not all(isinstance(each.user_attrs, dict) for each in study.get_trials(deepcopy=False)):
            raise _damage_error(folder)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, OptunaError):
        raise _damage_error(folder) from None
    return storage, study


def _read_plan(study: optuna.Study, folder: Path) -> Sweep:
    if plan := parse_record(Sweep, study.user_attrs.get(_PLAN)):
        return plan
    raise _damage_error(folder)


@dataclass(frozen=True, kw_only=True)
class _End:
    best: int = 0
    verdict: str = ""
    message: str = ""
    test: Mapping[str, Any] = field(default_factory=dict)


def _read_sweep(study: optuna.Study, plan: Sweep, folder: Path) -> Sweep:
    frozen = study.get_trials(deepcopy=False)
    known = [parse_record(Trial, each.user_attrs.get(_TRIAL)) for each in frozen]
    asked = {each.number: each for each in known if each}
    trials = tuple(asked.get(each.number, each) for each in plan.trials)
    end = parse_record(_End, study.user_attrs.get(_END, {}))
    if end is None:
        raise _damage_error(folder)
    return replace(plan, trials=trials, **tree_of(end))


def _parse_space(plan: Sweep) -> dict[str, BaseDistribution]:
    return {key: json_to_distribution(each) for key, each in plan.space.items()}


def _damage_error(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder / FILE} is damaged; start a new sweep (the runs of the old trials are kept)"
    )


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))


def _repair(path: Path) -> None:
    """Remove the lock file and the incomplete line that a killed process may leave."""
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
