"""Predicts with an exported model: finds the model, and starts the process that predicts."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla.pipelines import models, notebook
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.pipelines.settings import plain
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import child_process, termination
from flotilla.trainer.events import Event
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import USAGE, ConfigError, RunInterruptedError, UserError
from flotilla.trainer.storage.uri import require_uri

FORMS = {".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
STANDARD_OUTPUT = "-"
_VERSION = re.compile(r"(?P<name>.+)@(?P<number>[1-9][0-9]{0,8})")
# Maximum time for an interrupted process to end, in seconds.
_GRACE = 5.0
_POLL = 0.1
EVENTS, _SUMMARY = "events.jsonl", "summary.json"


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """The result of a prediction.

    Attributes:
        model: URI of the model.
        output: path of the output file, `-` for standard output, or empty for none.
        rows: number of predicted rows.
        skipped: number of unreadable rows.
        unsound: number of rows with a non-finite prediction.
        seconds: time from the first row read to the last row written.
        closed: whether the reader closed standard output before all rows were written.
        predictions: the predicted rows in the order of the input, if no output was given.
    """

    model: str
    output: str
    rows: int = 0
    skipped: int = 0
    unsound: int = 0
    seconds: float = 0.0
    closed: bool = False
    predictions: tuple[dict[str, Any], ...] = ()

    @property
    def rows_per_second(self) -> float:
        """The number of rows written per second. Loading the model is not counted."""
        return self.rows / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        """Return the model and the number of rows."""
        left_out = {"skipped": self.skipped} if self.skipped else {}
        return notebook.short("Prediction", self.model, self.output, rows=self.rows, **left_out)

    def _repr_html_(self) -> str:
        heads = list(dict.fromkeys(name for row in self.predictions for name in row))
        rows = ([row.get(name) for name in heads] for row in self.predictions)
        return notebook.table(f"{self.rows} rows {self.output}", heads, rows)


def predict(
    model: str | RunResult,
    inputs: str | Path | Sequence[str | Path] | Rows = (),
    *,
    output: str | Path = "",
    to: str = "",
    format: str = "",
    split: str = "",
    columns: str | Sequence[str] = (),
    batch_size: int = 0,
    skip_bad: bool = False,
    workdir: str | Path = "runs",
    root: str = "",
    on_event: Callable[[Event], None] | None = None,
) -> Prediction:
    """Predict classes, probabilities or numbers for data of any size. Raises `UserError`.

    Args:
        model: a run, `NAME` (its champion), `NAME@VERSION`, or the URI of a model.
        inputs: files, folders, patterns or URIs of CSV, JSONL, Parquet, npz or images; a list of
            mappings; or a data frame. With `split`, the URI of a dataset, or nothing.
        output: a .csv, .jsonl or .parquet file, `-` for standard output, or empty for no output.
        to: the format of the output. By default, the file name determines it.
        format: the format of the inputs. By default, their names determine it.
        split: the split to predict, from the dataset in `inputs` or, by default, the model's own.
        columns: input columns to copy to the output, as a list or comma-separated; `*` for all.
        batch_size: number of examples in a batch; 0 means the batch size of the evaluation.
        skip_bad: whether to skip unreadable rows.
        workdir: the folder of local runs.
        root: the storage root of the registry; by default the workdir.
        on_event: called with each event of the prediction process.

    Example:
        answers = flotilla.predict("churn", [{"age": 41, "plan": "basic"}]).predictions
        flotilla.predict("churn@3", "new.csv", output="answers.csv").rows
    """
    named = columns.split(",") if isinstance(columns, str) else columns
    request: dict[str, Any] = {"format": format, "split": split, "columns": [*filter(None, named)]}
    request |= {"batch_size": batch_size, "skip_bad": skip_bad}
    with _write_inputs(inputs) as given, _place(str(output)) as place:
        _check_inputs(given, split)
        request |= {"inputs": given, "output": place}
        request["form"] = choose_format(place, to if output else "")
        if place != STANDARD_OUTPUT:
            check_output(place, given)
            request["output"] = os.path.abspath(place)
        request["model"] = _find_model(model, workdir, root)
        found = answer(request, on_event or (lambda _event: None))
        return found if output else replace(found, output="", predictions=_read_rows(place))


@contextmanager
def _place(output: str) -> Iterator[str]:
    if output:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="flotilla-rows-") as name:
        yield str(Path(name) / "rows.jsonl")


def _read_rows(file: str) -> tuple[dict[str, Any], ...]:
    with open(file, encoding="utf-8") as lines:
        return tuple(json.loads(line) for line in lines)


def _find_model(model: str | RunResult, workdir: str | Path, root: str) -> str:
    if not isinstance(model, RunResult):
        return model_uri(model, models.choose_root(root, Path(workdir)))
    if uri := model.artifacts.get("model"):
        return uri
    raise ConfigError(f"MODEL: the run {model.run_id} exported no model (status: {model.status})")


@contextmanager
def _write_inputs(inputs: Any) -> Iterator[tuple[str, ...]]:
    # Recognize a data frame by this method, without an import of its library.
    rows = inputs.to_dict("records") if hasattr(inputs, "to_dict") else inputs
    if isinstance(rows, str | os.PathLike):
        yield (os.fspath(rows),)
    elif rows and all(isinstance(each, Mapping) for each in rows):
        with tempfile.TemporaryDirectory(prefix="flotilla-inputs-") as name:
            file = Path(name) / "rows.jsonl"
            file.write_text("".join(f"{_line(each)}\n" for each in rows), encoding="utf-8")
            yield (str(file),)
    else:
        yield tuple(os.fspath(each) for each in rows)


def _line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON. NaN becomes null, because a data frame stores missing values as NaN."""
    known = {
        str(name): None if isinstance(value, float) and math.isnan(value) else value
        for name, value in row.items()
    }
    return json.dumps(known, default=plain)


def _check_inputs(given: tuple[str, ...], split: str) -> None:
    if any(not each.strip() for each in given):
        raise ConfigError("INPUT is empty: give a file, a folder or a URI")
    if not given and not split:
        raise ConfigError(
            "INPUT is missing: give files, or add --split to use the model's own dataset"
        )
    if split and given and (len(given) > 1 or "://" not in given[0]):
        raise ConfigError(
            "INPUT: --split needs the URI of one dataset; leave INPUT out to use the dataset of "
            "the model"
        )


def model_uri(model: str, root: str) -> str:
    """Return the URI of a model given by URI, folder or `NAME[@VERSION]`. Raises `ConfigError`."""
    if "://" in model:
        require_uri("MODEL", model)
        return model.rstrip("/") if "?" not in model else model
    if "/" in model:
        return storage.uri_of(model)
    found = _VERSION.fullmatch(model)
    name, number = (found["name"], int(found["number"])) if found else (model, 0)
    if "@" in name or not name:
        raise ConfigError(f"MODEL: {model!r} is not a model: write NAME, NAME@3 or a URI")
    models.require_known(root, name)
    if number:
        return registry.version(root, name, number).uri
    champion = registry.champion(root, name)
    if champion is None:
        raise ConfigError(f"{name} has no champion below {root}; add a version, such as {name}@1")
    return champion.uri


def choose_format(output: str, said: str) -> str:
    """Return `said`, or else the format of the file extension. Raises `ConfigError`."""
    if output == STANDARD_OUTPUT:
        if said == "parquet":
            raise ConfigError("--to: parquet needs an output file; add -o FILE")
        return said or "jsonl"
    ending = FORMS.get(Path(output).suffix, "")
    if not ending and not said:
        raise ConfigError(
            f"-o: the name of {output} does not end with one of {', '.join(FORMS)}; rename it, or "
            "set the format with --to"
        )
    return said or ending


def check_output(output: str, inputs: tuple[str, ...]) -> None:
    """Reject an output that is a URI, a folder or one of the inputs. Raises `ConfigError`."""
    if "://" in output:
        raise ConfigError(f"-o: {output!r} is not a path on this machine; use a local path")
    path = Path(output)
    if os.path.isdir(path):
        raise ConfigError(f"-o: {output} is a folder; give a file in it")
    for each in inputs:
        with suppress(OSError):
            if "://" not in each and path.exists() and path.samefile(each):
                raise ConfigError(f"-o: {output} is also an input; give another file")


def answer(request: dict[str, Any], on_event: Callable[[Event], None]) -> Prediction:
    """Process the fields of a `Request` in a child process, which writes the predicted rows.

    `on_event` is called with each event of that process. Raises `UserError`, or
    `RunInterruptedError` on a signal. No partial output file remains.
    """
    with tempfile.TemporaryDirectory(prefix="flotilla-predict-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        (folder / EVENTS).touch()
        interrupts: list[int] = []
        with (
            events.Follower(folder / EVENTS) as follower,
            signals.handle_interrupts(lambda: interrupts.append(1)),
        ):
            child = _start(folder)
            try:
                while child.poll() is None and not interrupts:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(_POLL)
                    for event in follower.new():
                        on_event(event)
            finally:
                child_process.end(child, _GRACE)
                _remove_part(child, request["output"])
            for event in follower.new():
                on_event(event)
        if interrupts:
            raise RunInterruptedError("interrupted; the partial output was removed")
        if child.returncode or not (folder / _SUMMARY).exists():
            raise _failure(folder, child.returncode)
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        return Prediction(model=request["model"], output=request["output"], **summary)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    words = ["predict", "--request", str(folder / "request.json"), "--workdir", str(folder)]
    variables = {
        events.VARIABLE: str(folder / EVENTS),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(folder),
    }
    with (folder / "stderr.log").open("wb") as log:
        # Start a separate session, so that Ctrl+C reaches only this process, which ends the child.
        return child_process.start(
            "flotilla.trainer", *words, variables=variables, stderr=log, start_new_session=True
        )


def _remove_part(child: subprocess.Popen[bytes], output: str) -> None:
    if output != STANDARD_OUTPUT:
        path = Path(output)
        with suppress(OSError):
            path.with_name(f".{path.name}.{child.pid}.part").unlink(missing_ok=True)


def _failure(folder: Path, code: int) -> UserError:
    message = termination.read(folder)
    if not message:
        said = child_process.failure(code, (folder / "stderr.log").read_text(errors="replace"))
        remedy = "; lower --batch-size" if code == -signal.SIGKILL else ""
        message = f"the prediction process failed: {said}{remedy}"
    return ConfigError(message) if code == USAGE else UserError(message)
