"""Where a model is from, as an in-toto statement with the predicate of SLSA provenance v1.

`provenance.json` is in the registered version next to the files that are its subjects, and signed
with them. See https://slsa.dev/spec/v1.0/provenance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.signing.signing import FIELDS, SIGNATURE

FILE = "provenance.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "flotilla/training/v1"
_CHUNK = 1 << 20
_COMMIT_DIGITS = 40


def write(folder: Path, name: str, lineage: Mapping[str, Any], created: str) -> None:
    """Write the statement about all files below `folder`.

    Args:
        folder: the files of the version.
        name: of the model.
        lineage: as in the manifest of a version.
        created: when the exported model was published.
    """
    (folder / FILE).unlink(missing_ok=True)
    tree = statement(_subjects(folder), name, lineage, created)
    text = json.dumps(tree, indent=2, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def statement(
    subjects: list[dict[str, Any]], name: str, lineage: Mapping[str, Any], created: str
) -> dict[str, Any]:
    """Return the statement; what the lineage does not say is left out."""
    config = {"name": name, "configuration": lineage.get("config", "")}
    return {
        "_type": STATEMENT,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": config,
                "internalParameters": {"image": lineage.get("image", "")},
                "resolvedDependencies": list(_dependencies(lineage)),
            },
            "runDetails": {
                "builder": {"id": BUILD, "version": {"flotilla": version("flotilla")}},
                "metadata": {
                    "invocationId": str(lineage.get("run_id", "")),
                    "finishedOn": created,
                },
            },
        },
    }


def _dependencies(lineage: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("dataset", "checkpoint", "warmed_from", "code", "evaluation", "decision"):
        if uri := str(lineage.get(key) or ""):
            found: dict[str, Any] = {"name": key, "uri": uri}
            if key == "dataset" and lineage.get("fingerprint"):
                found["digest"] = {"sha256": str(lineage["fingerprint"])}
            yield found
    commit, _, dirty = str(lineage.get("commit") or "").partition("-")
    if len(commit) == _COMMIT_DIGITS:
        found = {"name": "flotilla", "digest": {"gitCommit": commit}}
        yield {**found, "annotations": {"changed": True}} if dirty else found
    if image := str(lineage.get("image") or ""):
        digest = image.partition("@sha256:")[2]
        yield {"name": "image", "uri": image, **({"digest": {"sha256": digest}} if digest else {})}


def _subjects(folder: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {"name": path.relative_to(folder).as_posix(), "digest": {"sha256": _sha256(path)}}
        for path in files
        if path.name not in {FIELDS, SIGNATURE}
    ]


def _sha256(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()
