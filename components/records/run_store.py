"""The files of a run: their names, locations and formats.

They are stored below the run's URI, `<root>/<run id>`, or in its local folder if it has one:

    config.json          the configuration
    pinned_inputs.json   only in a local run: values that it looked up, reused when it is resumed
    given/STEP.json      the arguments of a step, written before its body begins
    steps/STAGE.json     the record of a stage, see `flotilla.components.records.step_record`
    trials/...           only in a sweep: its trials, and the survivors of each rung

Steps publish their outputs below the run's URI, see `choose_output`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.config.form import from_form
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import now, to_tree
from flotilla.trainer.promotion import lineage
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse, parse_mapping, read_record
from flotilla.trainer.runtime.masking import mask

RUN_ID = "FLOTILLA_RUN_ID"
RUN_FOLDER = "FLOTILLA_RUN_FOLDER"
#: The folder below KFP's pipeline root for runs without a `storage.root`.
FLOTILLA = "flotilla"
CONFIG, PINNED = "config.json", "pinned_inputs.json"
GIVEN, STEPS, TRIALS = "given", "steps", "trials"
_PLAIN = (str, int, float, bool, list, dict, type(None))


def find_run_id(kfp_run_id: str) -> str:
    """Return the run id set by the command line, or KFP's run id for a run started on KFP."""
    return os.environ.get(RUN_ID) or kfp_run_id


def is_local_run() -> bool:
    """Return whether the command line runs the pipeline on this machine."""
    return bool(os.environ.get(RUN_ID))


def find_root(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return `storage.root`, or the folder `flotilla` below the run's KFP pipeline root.

    `artifact` is the URI of an output: `<pipeline root>/<pipeline>/<run id>/<step>/<name>`. Raises
    `UserError` if there is neither a configured nor a pipeline root.
    """
    if configured:
        return configured
    if pipeline_root := find_pipeline_root(artifact, kfp_run_id):
        return storage.join(pipeline_root, FLOTILLA)
    raise UserError("storage.root is empty: set it to a URI for the outputs of all runs")


def find_pipeline_root(artifact: str, kfp_run_id: str) -> str:
    """Return KFP's pipeline root from the URI of an output, or an empty string; see `find_root`."""
    path, mark, query = artifact.partition("?")
    before, found, _ = path.partition(f"/{kfp_run_id}/")
    pipeline_root = before.rpartition("/")[0]
    return f"{pipeline_root}{mark}{query}" if found and "://" in pipeline_root else ""


def choose_output(root: str, run_id: str, kind: str, source: str, *origin: str) -> str:
    """Return the URI at which to publish the output made from `source`.

    The name combines the name of `source` with a digest of all other inputs. So a run that is
    resumed with another policy or format publishes to another URI.
    """
    name = storage.name_of(source)
    digest = hashlib.sha256("\n".join(origin).encode()).hexdigest()[:12]
    return storage.join(root, run_id, kind, f"{name}-{digest}")


def find_run(root: str, run_id: str) -> str:
    """Return the URI of the run, or "" if it is unknown or the steps share a local folder."""
    if os.environ.get(RUN_FOLDER) or not (root and run_id):
        return ""
    with suppress(UserError):
        return storage.join(root, run_id)
    return ""


def run_at_first(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return the URI of the run, as `find_run` does, but determine the root with `find_root`."""
    with suppress(UserError):
        return find_run(find_root(configured, artifact, kfp_run_id), find_run_id(kfp_run_id))
    return ""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        yield Path(folder)


def folder_of_run() -> AbstractContextManager[Path]:
    """Return a context with the local folder of the run, or a temporary folder if it has none."""
    folder = os.environ.get(RUN_FOLDER)
    return nullcontext(Path(folder)) if folder else scratch_folder()


def record_uri(at: str, folder: str, name: str) -> str:
    """Return the URI of a record in a folder of the run at `at`."""
    return storage.join(at, folder, f"{name}.json")


def read_pinned(key: str) -> str:
    """Return the value that the run pinned for `key`, or an empty string if there is none."""
    return _read_all_pinned().get(key, "")


def pin(key: str, value: str) -> None:
    """Pin the value of `key` if the run has a local folder. Raises `UserError` if this fails."""
    if folder := os.environ.get(RUN_FOLDER):
        # Write atomically, because earlier values must survive a full disk.
        uri = storage.join(storage.uri_of(folder), PINNED)
        storage.write_bytes(uri, json.dumps({**_read_all_pinned(), key: value}).encode())


def pin_once(key: str, find: Callable[[], str]) -> str:
    """Return the run's pinned value for `key`. If there is none, pin the result of `find`."""
    values = _read_all_pinned()
    if key not in values:
        pin(key, values.setdefault(key, find()))
    return values[key]


def _read_all_pinned() -> dict[str, str]:
    # Treat a missing or damaged file as empty. It is missing until the first value is pinned.
    with suppress(KeyError, OSError, ValueError):
        tree = parse_mapping(Path(os.environ[RUN_FOLDER], PINNED).read_bytes())
        return {str(key): str(value) for key, value in tree.items()}
    return {}


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of a step at its last start.

    Attributes:
        arguments: arguments with JSON values, by name.
        artifacts: for each other argument, by name: its `uri`, and its file's content as `tree`.
        code: the digest of each user module that the configuration names, keyed by module name.
    """

    step: str
    began: float
    arguments: Mapping[str, Any]
    artifacts: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    commit: str = ""
    code: Mapping[str, str] = field(default_factory=dict)


def record_call(step: str, call: Mapping[str, Any]) -> Given:
    """Return the record of a step that starts now. `call` contains its arguments by name."""
    plain = {name: value for name, value in call.items() if isinstance(value, _PLAIN)}
    others = {name: _describe_argument(value) for name, value in call.items() if name not in plain}
    return Given(
        step=step,
        began=now(),
        arguments=plain,
        artifacts=others,
        version=version("kfp-flotilla"),
        commit=lineage.commit(),
        code=digests(find_config(plain)),
    )


def _describe_argument(value: Any) -> dict[str, Any]:
    try:
        tree = parse(Path(value.path).read_bytes())
    except (OSError, ValueError, AttributeError):
        tree = None
    return {"uri": getattr(value, "uri", ""), "tree": tree}


def find_config(arguments: Mapping[str, Any]) -> Config | None:
    """Return the configuration among a step's arguments, or None if it is missing or invalid."""
    try:
        # The first step has no configuration as an argument. Build it from the fields of the form.
        if "storage_root" in arguments:
            return from_form(arguments)
        return Config.model_validate_json(str(arguments.get("config", "")))
    except (ConfigError, ValueError, KeyError):
        return None


def digests(config: Config | None) -> dict[str, str]:
    """Return the digest of each user module in a configuration, or {} if it names a code bundle."""
    if config is None or config.code:
        return {}
    names = [name for _, name in trained.own_code(config)]
    return {
        module: _digest(module)
        for module in sorted({name.partition(":")[0] for name in names if ":" in name})
    }


def _digest(module: str) -> str:
    try:
        return user_code.digest("code", module)
    except ConfigError:
        # Ignore the error, which the step reports later.
        return ""


def write_given(given: Given, at: str) -> None:
    """Write the record below the run's URI, or in its local folder if `at` is empty.

    Raises `UserError` if it cannot be written.
    """
    text = mask(json.dumps(to_tree(given), indent=2, default=str))
    folder = os.environ.get(RUN_FOLDER)
    if at or folder:
        uri = at or storage.uri_of(folder or "")
        storage.write_bytes(record_uri(uri, GIVEN, given.step), text.encode())


def read_given(at: str, step: str) -> Given:
    """Return the recorded arguments of a step of the run at URI `at`. Raises `UserError`."""
    uri = record_uri(at, GIVEN, step)
    try:
        found = read_record(Given, storage.read_bytes(uri))
    except storage.Missing:
        raise UserError(
            f"the inputs of {step} are not recorded ({uri}): the run was made by an older version, "
            "or the record could not be written; start the run again to record them"
        ) from None
    if found is None or found.step != step:
        raise UserError(f"the record {uri} is damaged, so {step} cannot be replayed")
    return found
