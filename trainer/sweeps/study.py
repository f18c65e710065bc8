"""The search space of a sweep, and its local state: an Optuna study with a journal in its folder.

A key of `--set` is searched if it has several values, `key=a,b,c`, or a range, `key=low..high`.
Both become distributions in Optuna. Commas within brackets or quotes are part of a value. The
trials of a grid and random trials are known in advance.

User attributes store what Optuna does not know about a trial, such as its run. A trial that failed
or was interrupted stays `running` in Optuna until the sweep ends, so that `--resume` can retry it.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    json_to_distribution,
)
from optuna.exceptions import OptunaError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState

from flotilla.trainer.config.base import AUTOMATIC
from flotilla.trainer.config.load import override, parse_value
from flotilla.trainer.config.model import OF_MODEL
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse_record, tree_of
from flotilla.trainer.sweeps.sweep import (
    FAILED,
    INTERRUPTED,
    REDUCTION,
    RUNNING,
    Result,
    Settings,
    Sweep,
    Trial,
    list_assignments,
    make_config,
)

#: Maximum number of trials in a sweep. More would take too long, and not fit into a table.
MOST_TRIALS = 1000
# Number of significant digits of a sampled number. More digits hardly change the result.
_DIGITS = 4
# Maximum number of consecutive samples that repeat a known trial.
_MOST_REPEATS = 100
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"^\s*({_NUMBER})\.\.({_NUMBER})(:log)?\s*$")
_WHOLE = re.compile(r"[-+]?\d+")
_OPEN, _CLOSE = "[{(", "]})"
# Sections that must be the same in all trials, and the reasons.
_SAME = {
    "name": "the registry compares models that have the same name",
    "data": "trials are compared on the same validation examples",
    "evaluation": "only the best trial is evaluated on the test split",
    "gate": "the gate judges only the best trial",
    "export": "only the best trial is exported",
    "registry": "only the best trial is registered",
    "storage": "all trials share the published data",
}
_SEARCHED_OF_DATA = ("data.partition",)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space: a base configuration, and distributions of the searched keys."""

    base: Config
    keys: Mapping[str, BaseDistribution]


def parse_space(config: Config, assignments: Iterable[str]) -> Space:
    """Parse `section.key=value` assignments for a configuration. Raises `ConfigError`."""
    fixed: list[str] = []
    keys: dict[str, BaseDistribution] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {assignment!r}: write it as section.key=a,b,c")
        if key in keys:
            raise ConfigError(f"--set {assignment!r}: {key} is already searched; keep one")
        values = _values(assignment, text)
        ranged = _RANGE.match(text)
        if len(values) == 1 and not ranged:
            fixed.append(assignment)
            continue
        _require_searchable(key, assignment)
        keys[key] = (
            _range(assignment, *ranged.groups())
            if ranged
            else CategoricalDistribution(list(dict.fromkeys(values)))
        )
    _require_disjoint(keys, fixed)
    base = override(config, fixed)
    if not keys:
        raise ConfigError(
            "no key is searched: give a key several values, such as "
            "--set training.optimizer.learning_rate=0.01,0.003,0.001"
        )
    return Space(base=base, keys=keys)


# For each model, the arguments that affect its quality most, with values as in `--set`.
_WIDTHS = "[64],[128],[256],[64, 64],[128, 128],[256, 256],[128, 128, 128]"
_SHARES = "0.0,0.1,0.2,0.3,0.5"
_TOWERS = {"dimension": "8,16,32,64", "hidden_units": "[],[64],[64, 64]"}
_OF_MODELS = {
    "mlp": {"hidden_units": _WIDTHS, "dropout": _SHARES},
    "tabular": {"hidden_units": _WIDTHS, "dropout": _SHARES, "dimension": "8,16,32"},
    "sequence": {"dimension": "24,48,96", "blocks": "4,6,8", "dropout": _SHARES},
    "cnn": {
        "filters": "[16, 32],[32, 64],[64, 128],[32, 64, 128]",
        "hidden_units": "[64],[128],[256]",
        "dropout": _SHARES,
    },
    "gru": {"units": "16,32,64,128", "dimension": "8,16,32,64"},
    "two_tower": _TOWERS,
    "two_tower_ranker": {**_TOWERS, "ranking_units": "[],[32],[64]"},
}
_RATE, _DECAY = "training.optimizer.learning_rate", "training.optimizer.args.weight_decay"
_LEAST_BATCH = 8


def is_searched(assignment: str) -> bool:
    """Return whether a `--set` assignment has several values or a range."""
    text = assignment.partition("=")[2]
    return len(_split(text)) > 1 or bool(_RANGE.match(text))


def automatic(config: Config, given: Iterable[str]) -> tuple[str, ...]:
    """Return a search space for the configured model, as `--set` assignments.

    The space contains the batch size and, unless the model defines its optimizer, the learning rate
    and the weight decay. For most built-in models, it also contains arguments such as width and
    dropout. A key is left out if `given` sets it, a part of it, or a section that contains it.
    """
    training = config.training
    rate, batch = training.optimizer.learning_rate, training.batch_size
    # If a value is derived from the examples, search around a usual value.
    rate = 0.001 if rate == AUTOMATIC else rate
    batch = 128 if batch == AUTOMATIC else batch
    found = {
        f"model.args.{key}": text for key, text in _OF_MODELS.get(config.model.name, {}).items()
    }
    if training.optimizer.name != OF_MODEL:
        found |= {_RATE: f"{rate / 10:g}..{rate * 10:g}:log", _DECAY: "1e-06..0.1:log"}
    sizes = sorted({max(_LEAST_BATCH, size) for size in (batch // 4, batch, batch * 4)})
    found["training.batch_size"] = ",".join(map(str, sizes))
    names = [each.partition("=")[0].strip() for each in given]
    return tuple(
        f"{key}={text}"
        for key, text in found.items()
        if not any(f"{key}.".startswith(f"{n}.") or n.startswith(f"{key}.") for n in names)
    )


def grid(space: Space) -> tuple[Settings, ...]:
    """Return the settings of all trials, without duplicates. Raises `ConfigError`."""
    lists: dict[str, Sequence[Any]] = {}
    for key, values in space.keys.items():
        if not isinstance(values, CategoricalDistribution):
            raise ConfigError(
                f"--set {key}: a grid has no ranges; list values, or add --random N or --tpe N"
            )
        lists[key] = values.choices
    count = math.prod(map(len, lists.values()))
    if count > MOST_TRIALS:
        raise ConfigError(
            f"the grid has {count} trials, but at most {MOST_TRIALS} are allowed: give fewer "
            "values, or draw N of the trials with --random N"
        )
    combined = itertools.product(*lists.values())
    return _check_trials(
        space.base, (dict(zip(lists, each, strict=True)) for each in combined), count
    )


def draw_trials(space: Space, count: int, seed: int) -> tuple[Settings, ...]:
    """Return the settings of at most `count` random trials. Raises `ConfigError`."""
    study = optuna.create_study(sampler=RandomSampler(seed))

    def draws() -> Iterator[Settings]:
        seen: set[tuple[str, ...]] = set()
        repeats = 0
        while repeats < _MOST_REPEATS:
            settings = make_settings(space.keys, study.ask(dict(space.keys)).params)
            is_known = tuple(settings.values()) in seen
            repeats = repeats + 1 if is_known else 0
            seen.add(tuple(settings.values()))
            if not is_known:
                yield settings

    # Check every value, because the random trials may not include all of them.
    corners(space)
    return _check_trials(space.base, draws(), count)


def corners(space: Space) -> tuple[Settings, ...]:
    """Return a trial for each value or range end of each key. Other keys have their first value."""
    ends: dict[str, list[str]] = {}
    for key, values in space.keys.items():
        if isinstance(values, IntDistribution | FloatDistribution):
            found: Sequence[Any] = (values.low, values.high)
        else:
            assert isinstance(values, CategoricalDistribution)
            found = values.choices
        ends[key] = [format_setting(values, each) for each in found]
    first = {key: values[0] for key, values in ends.items()}
    every = [{**first, key: value} for key, values in ends.items() for value in values]
    return _check_trials(space.base, every, len(every))


def make_settings(keys: Mapping[str, BaseDistribution], params: Mapping[str, Any]) -> Settings:
    """Convert sampled parameters to the settings of a trial."""
    return {key: format_setting(values, params[key]) for key, values in keys.items()}


def to_parameters(keys: Mapping[str, BaseDistribution], settings: Settings) -> dict[str, Any]:
    """Convert the settings of a trial to parameters for the sampler."""
    kinds = {IntDistribution: int, FloatDistribution: float}
    return {key: kinds.get(type(values), str)(settings[key]) for key, values in keys.items()}


def format_setting(values: BaseDistribution, value: Any) -> str:
    """Format a value for `--set`."""
    if not isinstance(values, FloatDistribution):
        return str(value)
    short = float(f"{value:.{_DIGITS}g}")
    return repr(min(max(short, values.low), values.high))


def _check_trials(base: Config, every: Iterable[Settings], count: int) -> tuple[Settings, ...]:
    """Return the first `count` trials with different configurations. Raises `ConfigError`."""
    found: dict[str, Settings] = {}
    for settings in every:
        try:
            config = make_config(base, settings)
        except ConfigError as error:
            trial = ", ".join(list_assignments(settings))
            raise ConfigError(f"the trial {trial}: {error}") from None
        found.setdefault(config.model_dump_json(), settings)
        if len(found) == count:
            break
    return tuple(found.values())


def _require_searchable(key: str, assignment: str) -> None:
    section = key.partition(".")[0]
    if section in _SAME and key not in _SEARCHED_OF_DATA:
        raise ConfigError(
            f"--set {assignment!r}: {key} must be the same for all trials: {_SAME[section]} (to "
            "set a list as one value, write it in brackets)"
        )


def _require_disjoint(keys: Mapping[str, object], fixed: Sequence[str]) -> None:
    """Refuse a searched key if it or a part of it is set again, because the order would matter."""
    names = [each.partition("=")[0].strip() for each in fixed]
    for key in keys:
        for other in (*names, *keys):
            if (other == key and names.count(key)) or other.startswith(f"{key}."):
                raise ConfigError(f"--set {key} and --set {other}: both set {other}; keep one")


def _values(assignment: str, text: str) -> list[str]:
    values = [part.strip() for part in _split(text)]
    if not any(values):
        raise ConfigError(f"--set {assignment!r} has no value: write section.key=a,b,c")
    if not all(values):
        raise ConfigError(f"--set {assignment!r}: one of the values between the commas is empty")
    for value in values:
        parse_value(value)
    if len(values) > 1 and any(_RANGE.match(value) for value in values):
        raise ConfigError(
            f"--set {assignment!r}: a range cannot be combined with values; use one of them"
        )
    return values


def _range(assignment: str, low: str, high: str, log: str | None) -> BaseDistribution:
    ends = float(low), float(high)
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise ConfigError(
            f"--set {assignment!r}: the first number of a range must be below the last"
        )
    if log and ends[0] <= 0:
        raise ConfigError(f"--set {assignment!r}: a logarithmic range (:log) must start above zero")
    if _WHOLE.fullmatch(low) and _WHOLE.fullmatch(high):
        return IntDistribution(int(low), int(high), log=bool(log))
    return FloatDistribution(*ends, log=bool(log))


def _split(text: str) -> list[str]:
    """Split text at commas that are not within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1].strip(" [{(,:"):
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


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
