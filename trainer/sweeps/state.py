"""What is known of a sweep, and the file in which it is kept.

The file is replaced as a whole after each change, so that a sweep that is killed goes on from the
last one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError
from trainer.json_records import from_tree, parse, tree_of
from trainer.sweeps.space import assignments_of, config_of
from trainer.sweeps.trial import DONE, Objective, Result, Trial

FILE = "sweep.json"
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep so far.

    Attributes:
        sweep_id: its name, and that of its folder.
        config: what all trials share, as JSON keys.
        source: the file of the configuration as it was given, for the command; or empty.
        fixed: `section.key=value` texts that were given for all trials, likewise.
        keys: those that are searched.
        objective: by which trials are compared.
        rungs: global steps of each; a single zero without halving.
        trials: all of them, by number.
        best: number of the trial that goes through the gate; 0 until it is chosen.
        verdict: how that ended: `blessed`, `refused`, `failed` and so on; empty before.
        message: why, in one line.
        test: metrics of the best trial on the test split.
    """

    sweep_id: str
    config: Mapping[str, Any]
    source: str
    fixed: tuple[str, ...]
    keys: tuple[str, ...]
    objective: Objective
    rungs: tuple[int, ...]
    trials: tuple[Trial, ...]
    best: int = 0
    verdict: str = ""
    message: str = ""
    test: Mapping[str, Any]
    schema: int = _SCHEMA

    @property
    def base(self) -> Config:
        """The configuration that all trials share; raises `ConfigError` where it is damaged."""
        return parse_config(self.config)

    @property
    def chosen(self) -> Trial | None:
        """The best trial, once it was chosen."""
        return next((each for each in self.trials if each.number == self.best), None)

    def with_trial(self, trial: Trial) -> Sweep:
        """Return the sweep with another state of one trial."""
        every = (trial if each.number == trial.number else each for each in self.trials)
        return replace(self, trials=tuple(every))

    def config_on(self, trial: Trial, rung: int, base: Config) -> Config:
        """Return the configuration of a trial on a rung, laid over `base`; raises `ConfigError`."""
        config = config_of(base, trial.settings)
        if not self.rungs[rung]:
            return config
        training = config.training.model_copy(update={"steps": self.rungs[rung]})
        return config.model_copy(update={"training": training})

    def reached(self, trial: Trial, rung: int, steps: int, value: float) -> Trial:
        """Return a trial with what it reached on a rung."""
        before = tuple(each for each in trial.results if each.rung != rung)
        result = Result(rung=rung, steps=steps, value=value)
        return replace(trial, status=DONE, error="", rung=rung, results=(*before, result))

    def command(self) -> str:
        """Return the command that runs the best trial again; empty until it is chosen."""
        if self.chosen is None:
            return ""
        words = ["flotilla", "run", *filter(None, [self.source])]
        for text in (*self.fixed, *assignments_of(self.chosen.settings)):
            words += ["--set", text]
        return shlex.join(words)


def write(sweep: Sweep, folder: Path) -> None:
    """Replace the file of a sweep; raises `UserError` where that is not possible."""
    part = folder / f"{FILE}.part"
    try:
        part.write_text(json.dumps(tree_of(sweep), indent=1, default=str), encoding="utf-8")
        part.replace(folder / FILE)
    except OSError as error:
        raise UserError(
            f"cannot write {folder / FILE}: {error.strerror}; what the trials published is kept"
        ) from None


def read(folder: Path) -> Sweep:
    """Return the sweep of a folder; raises `ConfigError` where there is none, or it is damaged."""
    path = folder / FILE
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no sweep {folder.name!r} below {folder.parent}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        tree = None
    if isinstance(tree, dict) and tree.get("schema") not in (None, _SCHEMA):
        raise ConfigError(f"{path} was written by another version of Flotilla: use that one")
    if found := from_tree(Sweep, tree):
        return found
    raise ConfigError(f"{path} is damaged: start another sweep; the runs of its trials are kept")
