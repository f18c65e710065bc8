"""Records the training data of champions and the configurations of finished runs.

When a run reaches its decision, it writes a mark into the registry. The name of the mark is a
digest of the configuration, including the listing of the source files. Another run with the same
digest would only repeat this run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.config.program import ProgramConfig
from flotilla.trainer.config.schema import Config, OutputConfig, TaskConfig
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.json_records import parse_mapping

_MARK = "finished"
_PURPOSE = "purpose.json"
# Keys that do not affect the model. From the bundle in `code`, `digest` includes only the modules
# that the configuration names, and their imports.
_APART: Mapping[str, Any] = {
    "storage": True,
    "code": True,
    "training": {"when_unchanged"},
    "registry": {"hub"},
}


@dataclass(frozen=True, kw_only=True)
class TrainedData:
    """The training data of the champion.

    Attributes:
        version: `data.version` of the champion, or of the newest earlier champion that has one.
        spans: the digest of each span that the champion or an earlier champion was trained on. If
            the digest of a span changed, this is the newest one.
    """

    version: str = ""
    spans: Mapping[str, str]


def read_champion_data(root: str, name: str) -> TrainedData:
    """Return the training data of the champion. Champions that were rolled back do not count."""
    return read_lineage_data(_lineages(root, name))


def read_lineage_data(lineages: Iterable[Mapping[str, Any]]) -> TrainedData:
    """Return the champion's training data from the lineages of all champions, newest first."""
    version, spans = "", dict[str, str]()
    for lineage in lineages:
        version = version or str(lineage.get("data_version", ""))
        for span, files in lineage.get("spans", {}).items():
            spans.setdefault(span, files)
    return TrainedData(version=version, spans=spans)


def _lineages(root: str, name: str) -> Iterator[Mapping[str, Any]]:
    made = {each.number: each for each in registry.promotions(root, name)}
    # Read the versions first, because a removal records the lineage before it deletes the version.
    here = registry.versions(root, name) if made else ()
    known = registry.read_retired(registry.home(root, name)) if made else {}
    known |= {each.number: each.manifest.fields.get("lineage", {}) for each in here}
    number = max(made, default=0)
    while number:
        promotion = made.get(number)
        if promotion and promotion.restores:
            number = promotion.restores
            continue
        if promotion and promotion.version in known:
            yield known[promotion.version]
        number -= 1


def digest(config: Config) -> str:
    """Return a digest that two runs share if one would repeat the other. Raises `ConfigError`."""
    tree = config.model_dump(mode="json", exclude=_APART)
    code = {
        f"{key} {name}": user_code.digest(key, name.partition(":")[0])
        for key, name in own_code(config)
        if ":" in name
    }
    code |= _digest_program(config.program)
    text = json.dumps({**tree, "code": code}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _digest_program(program: ProgramConfig) -> dict[str, str]:
    paths = {word: Path(program.working_dir, word) for word in program.command}
    with suppress(OSError):
        return {
            f"program {word}": hashlib.sha256(path.read_bytes()).hexdigest()
            for word, path in paths.items()
            if path.is_file()
        }
    return {}


def own_code(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and value of each setting that may name the user's code."""
    yield "data.map", config.data.map
    yield "model.name", config.model.name
    yield "training.strategy", config.training.strategy
    tasks: dict[str, TaskConfig | OutputConfig] = {"task": config.task}
    tasks |= {f"task.outputs.{label}": each for label, each in config.task.outputs.items()}
    for key, task in tasks.items():
        yield f"{key}.name", task.name
        yield f"{key}.loss", task.loss
        for metric in task.metrics:
            yield f"{key}.metrics", metric


def begin(config: Config, root: str, run_id: str) -> None:
    """Record the configuration of a run that starts."""
    tree = {"name": config.name, "digest": digest(config)}
    storage.write_bytes(_purpose(root, run_id), json.dumps(tree).encode())


def end(root: str, run_id: str, decision: str) -> None:
    """Mark that a run reached its decision. Do nothing if `begin` recorded nothing for it."""
    purpose = _read(_purpose(root, run_id))
    if {"name", "digest"} <= purpose.keys():
        uri = _mark(root, purpose["name"], purpose["digest"])
        storage.write_bytes(uri, json.dumps({"run_id": run_id, "decision": decision}).encode())


def find_finished(config: Config, root: str) -> str:
    """Return the id of the run that finished with this configuration, or "" if there is none."""
    return _read(_mark(root, config.name, digest(config))).get("run_id", "")


def _read(uri: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in parse_mapping(storage.read_bytes(uri)).items()}
    except storage.Missing:
        return {}
    except ValueError:
        raise storage.Corrupt(f"{uri} is damaged; delete it, and start the run again") from None


def _purpose(root: str, run_id: str) -> str:
    return storage.join(root, run_id, _PURPOSE)


def _mark(root: str, name: str, digest: str) -> str:
    return storage.join(registry.home(root, name), _MARK, f"{digest}.json")
