"""What the commands do once their words are parsed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.cli import display
from pipelines.runs import local
from pipelines.runs.outcome import Outcome
from trainer import storage
from trainer.checkpoints.index import list_checkpoints
from trainer.config.load import load_config
from trainer.config.schema import Config
from trainer.errors import INTERRUPTED, USAGE, ConfigError, UserError

DEFAULT_CONFIG = Path("configs/digits.yaml")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asked for on the command line.

    Attributes:
        pipeline: a name of `pipelines.training.PIPELINES`.
        config: the YAML file, or None for the default.
        assignments: the `--set` texts.
        workdir: below which everything is written.
        resume: a run to be taken up again, or empty.
        dataset: URI of a published dataset, or empty.
        as_json: whether the last line of standard output is one JSON object.
    """

    pipeline: str
    config: Path | None
    assignments: tuple[str, ...]
    workdir: Path
    resume: str = ""
    dataset: str = ""
    as_json: bool = False


def run(request: Request) -> int:
    """Run a pipeline on this machine, show it, and return the exit code; raises `UserError`."""
    require_current_folder()
    config = load(request)
    if request.resume:
        started = local.resumed_run(config, request.workdir, request.resume)
    else:
        started = local.new_run(config, request.workdir)
    errors = display.Terminal(stderr=True)
    errors.print(f"run {started.run_id} in {started.folder}", markup=False, soft_wrap=True)
    pipeline, extra = request.pipeline, {}
    if request.dataset:
        pipeline, extra = "train_on", {"dataset": request.dataset}
    with display.Display() as follow:
        outcome = local.execute(started, pipeline, extra, follow)
    with output():
        display.Terminal().print(display.closing_table(outcome))
    _last_words(errors, request, started, outcome)
    if request.as_json:
        print_json(_summary(started, outcome))
    return outcome.exit_code


def require_current_folder() -> None:
    """Raise a `ConfigError` where there is none: the steps look for the user's modules there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was removed; change to one that is there") from None


def load(request: Request) -> Config:
    """Read the configuration that the request names; raises `ConfigError`."""
    path = request.config
    if path is None and request.resume:
        path = local.saved_config(request.workdir, request.resume)
    return load_file(path, request.assignments)


def load_file(path: Path | None, assignments: Sequence[str]) -> Config:
    """Read a configuration, the default one where none is named; raises `ConfigError`."""
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    return load_config(path, assignments)


def print_json(summary: dict[str, object]) -> None:
    """Write one JSON object, with the keys that scripts rely on, as the last line of output."""
    whole = {"status": "", "run_id": "", "metrics": {}, "artifacts": {}, "message": "", **summary}
    with output():
        sys.stdout.write(json.dumps(whole) + "\n")


@contextmanager
def output() -> Iterator[None]:
    """Write to standard output in this block; raises a `UserError` where it takes no more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        display.write_nowhere(sys.stdout)
    except OSError as error:
        # What is left in the buffer would come to light as a traceback at the end.
        display.write_nowhere(sys.stdout)
        raise UserError(f"cannot write to standard output: {error.strerror}") from None


def _last_words(
    errors: display.Terminal, request: Request, run: local.LocalRun, outcome: Outcome
) -> None:
    if outcome.message:
        # Training says "interrupted at global step ..." by itself.
        told = outcome.message.startswith(outcome.status)
        words = outcome.message if told else f"{outcome.status}: {outcome.message}"
        errors.print(f"flotilla: {words}", markup=False, soft_wrap=True)
    if outcome.status == "failed":
        log = run.folder / "pipeline.log"
        errors.print(f"flotilla: all output is in {log}", markup=False, soft_wrap=True)
    if remedy := _remedy(request, run, outcome):
        errors.print(f"flotilla: {remedy}", markup=False, soft_wrap=True)


def _remedy(request: Request, run: local.LocalRun, outcome: Outcome) -> str:
    """Return how to go on with a run that has not come to its end, where that is possible."""
    again = ["flotilla", request.pipeline, "--workdir", str(request.workdir)]
    again += ["--resume", run.run_id]
    if request.dataset:
        again += ["--dataset", request.dataset]
    # Preparing begins anew: what was not published is not kept.
    if outcome.exit_code == INTERRUPTED and request.pipeline != "prepare":
        return f"go on with: {shlex.join(again)}"
    if outcome.status == "failed" and outcome.exit_code != USAGE and _has_checkpoint(run):
        return f"when that is put right, go on with: {shlex.join(again)}"
    return ""


def _has_checkpoint(run: local.LocalRun) -> bool:
    try:
        uri = storage.join(run.config.storage.root, run.run_id, "checkpoints")
        return bool(list_checkpoints(uri))
    except UserError:
        return False


def _summary(run: local.LocalRun, outcome: Outcome) -> dict[str, object]:
    summary: dict[str, object] = {
        "status": outcome.status,
        "run_id": run.run_id,
        "metrics": outcome.metrics("evaluate_model"),
        "artifacts": outcome.artifacts(),
        "message": outcome.message,
    }
    trained = outcome.metrics("train_model")
    if "global_step" in trained:
        summary["global_step"] = trained["global_step"]
    return summary
