"""The search space of a sweep, and its trials if they are known in advance (grid or random).

A key of `--set` is searched if it has several values, `key=a,b,c`, or a range, `key=low..high`.
Both become distributions in Optuna. Commas within brackets or quotes are part of a value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from flotilla.trainer.config.base import AUTOMATIC
from flotilla.trainer.config.load import override, parse_value
from flotilla.trainer.config.model import OF_MODEL
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.sweeps.sweep import Settings, list_assignments, make_config

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
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))

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
