"""Storage roots with many runs, laid out as the steps leave them but written without training."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import google_crc32c

from flotilla.trainer import storage
from flotilla.trainer.promotion import registry

NOW = datetime.now(UTC)


def manifest(folder: Path, kind: str, days: float, **fields) -> str:
    """Publish a directory with one file, dated some days ago."""
    folder.mkdir(parents=True)
    data = f"{kind} {folder.name}".encode() * 10
    path = f"{fields.get('saved_model', '.')}/data".removeprefix("./")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    crc32c = f"{google_crc32c.value(data):08x}"
    created = (NOW - timedelta(days=days)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = {"schema": 1, "kind": kind, "created": created}
    files = [{"path": path, "bytes": len(data), "crc32c": crc32c}]
    (folder / "MANIFEST.json").write_text(json.dumps({**head, "files": files, **fields}))
    return storage.uri_of(folder)


def age(folder: Path, days: float) -> None:
    """Set the age of all files below a folder, in days."""
    then = (NOW - timedelta(days=days)).timestamp()
    for above, _, names in os.walk(folder):
        for name in names:
            os.utime(Path(above, name), (then, then))


def run_of(
    root: Path, number: int, days: float, dataset: str, name: str = "", **more
) -> dict[str, str]:
    """Write one run; return the URIs of its published directories."""
    at = root / (name or f"digits-{number:04d}")
    checkpoint = manifest(at / "checkpoints" / "step-00000100", "checkpoint", days, **more)
    manifest(at / "checkpoints" / "step-00000000", "checkpoint", days, **more)
    made_from = {"dataset": dataset, "checkpoint": checkpoint}
    evaluation = manifest(at / "evaluation" / "e", "evaluation", days, made_from=made_from)
    decision = manifest(at / "decision" / "d", "decision", days, evaluation=evaluation)
    for each in ("config.json", "lock", "events.jsonl", "report.html"):
        (at / each).write_text("{}\n")
    age(at, days)
    found = {"dataset": dataset, "checkpoint": checkpoint, "evaluation": evaluation}
    return {**found, "decision": decision}


def version_of(root: Path, number: int, days: float, made: dict[str, str], **lineage) -> None:
    """Register a run's model, and make it the champion."""
    home = root / "registry" / "models" / "digits"
    fields = {"version": number, "made_from": made, "source": {"uri": "gone"}}
    fields["saved_model"] = f"serving/digits/{number}"
    fields["lineage"] = {**made, "spans": {str(number): f"digest {number}"}, **lineage}
    manifest(home / "versions" / f"{number:06d}", "model", days, **fields)
    if number == 1:
        manifest(root / "registry" / "names" / "digits", "name", days, name="digits")
    tree = {"version": number, "predecessor": number - 1, "restores": 0, "by": "test"}
    manifest(home / "promotions" / f"{number:06d}", "promotion", days, **tree)


def nights(root: Path, runs: int, versions: int, **lineage) -> None:
    """Write one run per night until today; every `runs // versions`-th run is registered."""
    every = runs // versions
    for number in range(1, runs + 1):
        days = runs - number + 0.01
        key = root / "datasets" / f"digits-{number // 10:03d}"
        dataset = storage.uri_of(key) if key.exists() else manifest(key, "dataset", days)
        made = run_of(root, number, days, dataset)
        if number % every == 0:
            version_of(root, number // every, days, made, **lineage)


def missing(root: str) -> list[str]:
    made = registry.promotions(root, "digits")
    found = []
    for each in made[-2:]:
        version = registry.version(root, "digits", each.version)
        uris = [version.uri, *version.manifest.fields["made_from"].values()]
        found += [uri for uri in uris if not whole(uri)]
    return found


def whole(uri: str) -> bool:
    try:
        storage.verify(uri)
    except (storage.NotPublished, storage.Corrupt):
        return False
    return True
