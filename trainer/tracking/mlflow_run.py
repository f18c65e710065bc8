"""Finds or creates one run in MLflow, describes its origin, and writes points and tags to it.

A run is found by the tag `flotilla.run_id`. A trial is a child of the run of its sweep. MLflow can
only append to a curve, so the steps that a curve already has are queried before its first point is
written, and again after each failure. Files are uploaded last, after the end of the run.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flotilla.trainer import storage
from flotilla.trainer.config.program import hide_environment
from flotilla.trainer.config.schema import Config
from flotilla.trainer.features.names import curve_name
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.tracking import addresses

# The variable that holds the commit of the code in an image.
_OF_IMAGE = "FLOTILLA_COMMIT"
_GIT_SECONDS = 10
# MLflow's limits for the name and the digest of a dataset.
_LONGEST_NAME, _LONGEST_DIGEST = 500, 36
_SOURCES = {"file": "local", "gs": "gs", "s3": "s3", "minio": "s3"}


def describe_origin() -> dict[str, str]:
    """Return MLflow tags for Flotilla's version, the user, and the commit of the code."""
    tags = {"mlflow.source.name": "flotilla", "flotilla.version": version("kfp-flotilla")}
    # Omit a user without a name, such as a numeric id in a container.
    with suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    if commit := os.environ.get(_OF_IMAGE) or _ask_git("rev-parse", "HEAD"):
        tags["mlflow.source.git.commit"] = commit
    if not os.environ.get(_OF_IMAGE) and commit:
        tags["mlflow.source.git.branch"] = _ask_git("rev-parse", "--abbrev-ref", "HEAD")
        changed = _ask_git("status", "--porcelain", "--untracked-files=no")
        tags["mlflow.source.git.dirty"] = str(bool(changed)).lower()
    return {key: value for key, value in tags.items() if value}


def _ask_git(*words: str) -> str:
    # Without this option, `git status` may leave a lock behind if it cannot write the index.
    command = ["git", "--no-optional-locks", *words]
    try:
        ended = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()


def describe_dataset(uri: str) -> dict[str, Any]:
    """Return the fields of MLflow's `Dataset` for a published dataset, or {} on an error."""
    try:
        fields = storage.read_manifest(uri).fields
    except UserError:
        return {}
    splits = fields.get("splits", {})
    rows = {name: each.get("examples", 0) for name, each in splits.items()}
    profile = {"num_rows": sum(rows.values()), **{f"num_rows_{key}": n for key, n in rows.items()}}
    place = mask(uri.partition("?")[0])
    return {
        "name": str(fields.get("dataset") or storage.name_of(uri))[:_LONGEST_NAME],
        "digest": str(fields.get("fingerprint") or storage.name_of(uri))[:_LONGEST_DIGEST],
        "source_type": _SOURCES.get(place.partition("://")[0], "local"),
        "source": json.dumps({"uri": place}),
        "profile": json.dumps(profile),
    }


OWN_ID = "flotilla.run_id"
# Timeout of one request, in seconds.
REQUEST_SECONDS = 10
# MLflow's limits for one request. The maximum length of a parameter is the lowest of all MLflow
# versions.
_MOST_METRICS, _MOST_PARAMETERS, _MOST_TAGS, _LONGEST_PARAMETER = 1000, 100, 100, 500
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Do not let MLflow report usage to its developers.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# Maximum number of points, of all curves together, that are kept while MLflow is unavailable.
MOST_WAITING = 20_000
_Item = TypeVar("_Item")
# Held while a run finds or creates its parent. Otherwise trials of a sweep, which start at the same
# time, could each create their common parent.
_CREATING = threading.Lock()


class Point(NamedTuple):
    """A value of a curve, with its time as a Unix timestamp in milliseconds.

    `repeats` is true for curves of training, which repeats steps after a restart.
    """

    name: str
    value: float
    step: int
    when: int
    repeats: bool


@dataclass(kw_only=True)
class Pending:
    """Data that is not yet written, and the status and end time if the run has ended.

    Attributes:
        datasets: URIs of published datasets.
        files: URI of each file by its name in MLflow.
        ended: Unix timestamp in milliseconds. 0 means now.
    """

    points: deque[Point] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    status: str = ""
    ended: int = 0

    def __bool__(self) -> bool:
        """Return whether there is anything to write."""
        return bool(self.points or self.tags or self.datasets or self.files or self.status)

    def merge(self, earlier: Pending) -> Pending:
        """Return this data merged with `earlier` pending data."""
        points = deque([*earlier.points, *self.points], maxlen=MOST_WAITING)
        return Pending(
            points=points,
            tags={**earlier.tags, **self.tags},
            datasets=list(dict.fromkeys([*earlier.datasets, *self.datasets])),
            files={**earlier.files, **self.files},
            status=self.status or earlier.status,
            ended=self.ended or earlier.ended,
        )


def client_of_mlflow() -> Any:
    """Return an MLflow client. Raises `ImportError` if the package is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=os.environ[addresses.URI])


@dataclass(frozen=True, kw_only=True)
class RunName:
    """The identity of a run, and the values for creating it.

    Attributes:
        run_id: Flotilla's id, or empty in a step that has only the id of the MLflow run.
        experiment: the name of the experiment if the environment sets none.
        parent: the id of the sweep that a trial belongs to, or empty.
        began: Unix timestamp in milliseconds. 0 means now.
        parameters: the parameters by key, or empty if another process writes them.
        ends: whether this process also ends the run. KFP ends the runs that it created.
    """

    run_id: str = ""
    experiment: str = ""
    parameters: Mapping[str, str]
    parent: str = ""
    began: int = 0
    place: addresses.Place = field(default_factory=addresses.Place)
    ends: bool = False


def list_parameters(config: Config) -> dict[str, str]:
    """Return the configuration as parameters, without empty values and cluster settings."""
    tree = hide_environment(config.model_dump(mode="json"))
    tree["cluster"].pop("kubernetes", None)
    if config.program.command:
        # Omit these sections, because a training program has its own model and optimizer.
        tree.pop("model")
        tree["training"].pop("optimizer")
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        elif value not in ("", [], None):
            text = value if isinstance(value, str) else json.dumps(value)
            yield curve_name(name), mask(text)[:_LONGEST_PARAMETER]


class MlflowRun:
    """Writes to one MLflow run. Every method may raise the client's errors."""

    def __init__(self, name: RunName) -> None:
        """Store the name, without connecting."""
        self._name = name
        self._client: Any = None
        self._id = ""
        # The steps that each curve is known to have in MLflow.
        self._steps: dict[str, set[int]] = {}

    @property
    def url(self) -> str:
        """The address of the tracker, for messages."""
        return mask(os.environ.get(addresses.URI, ""))

    def open(self) -> None:
        """Find or create the run, and write its missing parameters."""
        if self._id:
            return
        self._client = self._client or client_of_mlflow()
        with _CREATING:
            run = self._find()
        if self._name.ends and run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._write_parameters(run)
        self._id = run.info.run_id

    def write(self, pending: Pending) -> None:
        """Write all pending values."""
        self.open()
        try:
            self._write_points(pending.points)
        except BaseException:
            # It is unknown which values were written, so query the steps again before the retry.
            self._steps.clear()
            raise
        self._write_tags(self._id, pending.tags)
        self._write_datasets(pending.datasets)
        if pending.status and self._name.ends:
            self._client.set_terminated(self._id, pending.status, pending.ended or None)
        self._write_files(pending.files)

    def _find(self) -> Any:
        """Return the run. If it does not exist, create it and the run of its sweep."""
        parent = ""
        if self._name.parent:
            name = replace(self._name, run_id=self._name.parent, parent="", parameters={})
            experiment, found = find_run(self._client, name)
            found = found or create_run(self._client, name, experiment)
            parent = found.info.run_id
            self._write_tags(parent, {OWN_ID: name.run_id})
        experiment, run = find_run(self._client, self._name)
        return run or create_run(self._client, self._name, experiment, parent)

    def _write_datasets(self, uris: Iterable[str]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", "training")]
        described = [each for each in map(describe_dataset, uris) if each]
        if described:
            inputs = [DatasetInput(Dataset(**each), tags) for each in described]
            self._client.log_inputs(self._id, inputs)

    def _write_files(self, files: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory(prefix="tracked-") as folder:
            for name, uri in files.items():
                path = Path(folder, name)
                try:
                    path.write_bytes(storage.read_bytes(uri))
                except UserError:
                    # Skip a file that cannot be read, because it may have been removed.
                    continue
                self._client.log_artifact(self._id, str(path))

    def _write_parameters(self, run: Any) -> None:
        from mlflow.entities import Param

        run_id, wanted, known = run.info.run_id, self._name.parameters, run.data.params
        missing = [Param(key, value) for key, value in wanted.items() if key not in known]
        for some in _parts(missing, _MOST_PARAMETERS):
            self._client.log_batch(run_id, params=some)
        # MLflow does not allow changing a parameter, so new values are written as tags.
        tags = {
            f"flotilla.resumed_with.{key}": value
            for key, value in wanted.items()
            if known.get(key, value) != value
        }
        if self._name.run_id:
            tags[OWN_ID] = self._name.run_id
        self._write_tags(run_id, tags)

    def _write_points(self, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        fresh: list[Point] = []
        seen: dict[str, set[int]] = {}
        for point in points:
            steps = seen.setdefault(point.name, set(self._query_steps(point.name)))
            newest = max(steps, default=-1) if point.repeats else -1
            if point.step > newest and point.step not in steps:
                steps.add(point.step)
                fresh.append(point)
        for some in _parts(fresh, _MOST_METRICS):
            metrics = [Metric(each.name, each.value, each.when, each.step) for each in some]
            self._client.log_batch(self._id, metrics=metrics)
            for each in some:
                self._steps[each.name].add(each.step)

    def _query_steps(self, name: str) -> set[int]:
        if name not in self._steps:
            history = self._client.get_metric_history(self._id, name)
            self._steps[name] = {each.step for each in history}
        return self._steps[name]

    def _write_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        every = [RunTag(key, value) for key, value in tags.items()]
        for some in _parts(every, _MOST_TAGS):
            self._client.log_batch(run_id, tags=some)


def create_run(client: Any, name: RunName, experiment: str, parent: str = "") -> Any:
    """Create a run as a child of `parent`, or of the MLflow run that the environment names."""
    tags = {OWN_ID: name.run_id, **describe_origin()}
    if parent := parent or name.place.run:
        tags["mlflow.parentRunId"] = parent
    return client.create_run(experiment, name.began or None, tags, name.run_id)


def find_run(client: Any, name: RunName) -> tuple[str, Any]:
    """Return the id of the experiment, and the MLflow run or None.

    If the environment names the MLflow run of another Flotilla run, search its experiment.
    """
    if given := name.place.run:
        run = client.get_run(given)
        experiment = str(run.info.experiment_id)
        if not name.run_id or run.data.tags.get(OWN_ID) in (None, name.run_id):
            return experiment, run
    else:
        experiment = find_experiment(client, name.place, name.experiment)
    # The id needs no escaping, because it contains no quotes.
    chosen = f"tags.`{OWN_ID}` = '{name.run_id}'"
    runs = client.search_runs([experiment], chosen, max_results=1, order_by=["start_time ASC"])
    return experiment, client.get_run(runs[0].info.run_id) if runs else None


def find_experiment(client: Any, place: addresses.Place, default: str) -> str:
    """Return the id of the experiment. If `place` has no id, find or create it by its name."""
    if place.experiment:
        return place.experiment
    name = place.experiment_name or default
    found = client.get_experiment_by_name(name)
    if found is None:
        from mlflow.exceptions import MlflowException

        try:
            return str(client.create_experiment(name))
        except MlflowException:
            # Use the experiment of another run that created it in the meantime.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _parts(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def health() -> str:
    """Return a line about the server at `MLFLOW_TRACKING_URI`. Raises `UserError`."""
    import requests

    if find_spec("mlflow") is None:
        raise UserError(
            "MLFLOW_TRACKING_URI is set, but the extra mlflow is not installed; run "
            "pip install 'kfp-flotilla[mlflow]'"
        )
    address = os.environ[addresses.URI]
    if not address.startswith(("http://", "https://")):
        return f"MLflow writes to {mask(address)}"
    # MLflow's server answers this request without authentication.
    url = f"{address.rstrip('/')}/health"
    try:
        answer = requests.get(url, timeout=REQUEST_SECONDS / 2, allow_redirects=False)
    except (requests.RequestException, ValueError) as error:
        raise UserError(f"{mask(url)} does not respond: {type(error).__name__}") from None
    if answer.status_code != requests.codes.ok:
        raise UserError(f"{mask(url)} returns {answer.status_code}; check MLFLOW_TRACKING_URI")
    return f"MLflow responds at {mask(address)}"
