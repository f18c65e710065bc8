"""Sweeps on this machine, and as a single pipeline on a KFP instance.

The plan of a sweep is checked as a whole before the first trial starts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from optuna.distributions import distribution_to_json

from flotilla.pipelines.runs.local import DEFAULT_CONFIG, GivenConfig, configuration
from flotilla.trainer.config.load import override
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.sweeps import sweep
from flotilla.trainer.sweeps.study import (
    MOST_TRIALS,
    Space,
    automatic,
    corners,
    draw_trials,
    grid,
    is_searched,
    parse_space,
)

MOST_PARALLEL = 64
# A NumPy seed has 32 bits. Leave room for the number of trials, which a resumed sweep adds to it.
MOST_SEED = 1 << 31
# Number of trials of `--auto` without a time limit, and their maximum number with one.
TRIALS, TRIALS_BY_TIME = 20, 200
MOST_MINUTES = 60 * 24 * 365


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of a sweep.

    Attributes:
        label: columns to predict, if `config` is training data.
        settings: `section.key=value` strings. A key with several values or a range is searched.
        random: number of random trials, or None.
        tpe: number of trials that TPE chooses from earlier results, or None.
        halving: whether only the best third of the trials continues from each rung to the next.
        auto: whether to search a predefined space, with TPE and, if possible, halving.
        minutes: time limit, after which running trials are stopped; None for no limit.
        metric: validation metric, or empty for the main metric.
        better: `higher` or `lower`, or empty if the metric's name implies it.
    """

    config: GivenConfig = None
    label: Sequence[str] = ()
    settings: Sequence[str] = ()
    random: int | None = None
    tpe: int | None = None
    seed: int | None = None
    halving: bool = False
    auto: bool = False
    minutes: float | None = None
    metric: str = ""
    better: str = ""
    parallel: int = 1

    def __post_init__(self) -> None:
        """Reject contradictory options. Raises `ConfigError`."""
        if not 1 <= self.parallel <= MOST_PARALLEL:
            raise ConfigError(f"--parallel {self.parallel} is not between 1 and {MOST_PARALLEL}")
        if self.random is not None and self.tpe is not None:
            raise ConfigError("--random and --tpe both choose the trials; use only one of them")
        if self.seed is not None and self.random is None and self.tpe is None and not self.auto:
            raise ConfigError(
                f"--seed {self.seed} applies only to --random, --tpe and --auto; omit --seed"
            )
        if self.seed is not None and not 0 <= self.seed < MOST_SEED:
            raise ConfigError(f"--seed {self.seed} is not between 0 and {MOST_SEED - 1}")
        for name, count in (("--random", self.random), ("--tpe", self.tpe)):
            if count is not None and not 1 <= count <= MOST_TRIALS:
                raise ConfigError(f"{name} {count} is not between 1 and {MOST_TRIALS}")
        if self.minutes is not None and not 0 < self.minutes < MOST_MINUTES:
            raise ConfigError(f"--minutes {self.minutes:g} is not between 0 and {MOST_MINUTES}")
        if self.auto and self.random is not None:
            raise ConfigError("--auto lets TPE choose the trials; omit --random")
        if self.better not in ("", "higher", "lower"):
            raise ConfigError(f"--better {self.better!r} is neither higher nor lower")


def plan_sweep(options: SweepOptions) -> sweep.Sweep:
    """Return a sweep with all its trials. Raises `ConfigError` before any trial starts."""
    config = configuration(options.config, (), options.label)
    if options.auto:
        options = _automatic(options, config)
    space = parse_space(config, options.settings)
    sampler, every = _trials(space, options)
    known = corners(space) if sampler == "tpe" else every
    if len(every) == 1:
        raise ConfigError(
            "the search space has only one trial; add values for a key, or use `flotilla run`"
        )
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    name = space.base.name
    # Train even if an earlier run had the same configuration as the run of the best trial.
    training = space.base.training.model_copy(update={"when_unchanged": "train"})
    base = space.base.model_copy(update={"training": training})
    return sweep.Sweep(
        sweep_id=f"{name}-sweep-{stamp}",
        config=base.model_dump(mode="json"),
        source=_config_name(options.config),
        fixed=tuple(each for each in options.settings if each.partition("=")[0] not in space.keys),
        keys=tuple(space.keys),
        objective=sweep.make_objective(base, space.keys, options.metric, options.better),
        rungs=sweep.list_rungs(base, known, len(every), halving=options.halving),
        trials=tuple(
            sweep.Trial(number=number, settings=settings, run_id=f"{name}-t{number:02}-{stamp}")
            for number, settings in enumerate(every, start=1)
        ),
        sampler=sampler,
        seed=options.seed or 0,
        minutes=options.minutes or 0.0,
        space={key: distribution_to_json(values) for key, values in space.keys.items()},
    )


def _automatic(options: SweepOptions, config: Config) -> SweepOptions:
    """Return the options for a TPE search of a predefined space, with halving if possible."""
    given = override(config, (each for each in options.settings if not is_searched(each)))
    count = TRIALS if options.minutes is None else TRIALS_BY_TIME
    training = given.training
    may_halve = training.schedule.name != "cosine"
    return replace(
        options,
        auto=False,
        settings=(*options.settings, *automatic(given, options.settings)),
        tpe=options.tpe or count,
        halving=options.halving
        or (may_halve and training.steps >= sweep.LEAST_STEPS * sweep.REDUCTION),
    )


def _trials(space: Space, options: SweepOptions) -> tuple[str, tuple[sweep.Settings, ...]]:
    """Return the sampler and the settings of each trial. With TPE, the settings are still empty."""
    seed = options.seed or 0
    if options.random is not None:
        return "random", draw_trials(space, options.random, seed)
    if options.tpe is not None:
        return "tpe", ({},) * options.tpe
    return "grid", grid(space)


def _config_name(config: GivenConfig) -> str:
    if isinstance(config, Config | Mapping):
        return ""
    if config is None:
        return str(DEFAULT_CONFIG) if DEFAULT_CONFIG.exists() else ""
    return str(config)
