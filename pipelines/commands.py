"""What the commands do once their words are parsed."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from pipelines import display, local_run
from pipelines.outcome import Outcome
from trainer import config_file
from trainer.config import Config
from trainer.errors import INTERRUPTED, ConfigError

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
    _require_current_folder()
    config = load(request)
    if request.resume:
        started = local_run.resumed_run(config, request.workdir, request.resume)
    else:
        started = local_run.new_run(config, request.workdir)
    errors = display.Terminal(stderr=True)
    errors.print(f"run {started.run_id} in {started.folder}", markup=False, soft_wrap=True)
    pipeline, extra = request.pipeline, {}
    if request.dataset:
        pipeline, extra = "train_on", {"dataset": request.dataset}
    with display.Display() as follow:
        outcome = local_run.execute(started, pipeline, extra, follow)
    display.Terminal().print(display.closing_table(outcome))
    _last_words(errors, request, started, outcome)
    if request.as_json:
        print_json(_summary(started, outcome))
    return outcome.exit_code


def _require_current_folder() -> None:
    # The steps look for the user's modules there.
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was removed; change to one that is there") from None


def load(request: Request) -> Config:
    """Read the configuration that the request names; raises `ConfigError`."""
    path = request.config
    if path is None and request.resume:
        path = local_run.saved_config(request.workdir, request.resume)
    elif path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    return config_file.load(path, request.assignments)


def print_json(summary: dict[str, object]) -> None:
    """Write one JSON object, with the keys that scripts rely on, as the last line of output."""
    whole = {"status": "", "run_id": "", "metrics": {}, "artifacts": {}, "message": "", **summary}
    try:
        sys.stdout.write(json.dumps(whole) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        display.write_nowhere(sys.stdout)


def _last_words(
    errors: display.Terminal, request: Request, run: local_run.LocalRun, outcome: Outcome
) -> None:
    if outcome.message:
        # Training says "interrupted at global step ..." by itself.
        told = outcome.message.startswith(outcome.status)
        words = outcome.message if told else f"{outcome.status}: {outcome.message}"
        errors.print(f"flotilla: {words}", markup=False, soft_wrap=True)
    # Preparing begins anew: what was not published is not kept.
    if outcome.exit_code == INTERRUPTED and request.pipeline != "prepare":
        again = ["flotilla", request.pipeline, "--workdir", str(request.workdir)]
        again += ["--resume", run.run_id]
        if request.dataset:
            again += ["--dataset", request.dataset]
        command = shlex.join(again)
        errors.print(f"flotilla: go on with: {command}", markup=False, soft_wrap=True)
    elif outcome.status == "failed":
        log = run.folder / "pipeline.log"
        errors.print(f"flotilla: all output is in {log}", markup=False, soft_wrap=True)


def _summary(run: local_run.LocalRun, outcome: Outcome) -> dict[str, object]:
    summary: dict[str, object] = {
        "status": outcome.status,
        "run_id": run.run_id,
        "metrics": outcome.figures("evaluate_model"),
        "artifacts": outcome.artifacts(),
        "message": outcome.message,
    }
    trained = outcome.figures("train_model")
    if "global_step" in trained:
        summary["global_step"] = trained["global_step"]
    return summary
