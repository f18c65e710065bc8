"""The model registry: models by name, their versions, and which version is the champion.

The records are below `<root>/registry`. Published directories are written once and never changed.

    names/NAME                       marks that a model of this name exists
    models/NAME/versions/000003      a copy of an exported model (kind `model`), with its lineage
    models/NAME/promotions/000002    `promotion.json`: the version that became the champion, and the
                                     number of the previous promotion
    models/NAME/retired/000003.json  the lineage of a version that retention removes, written before
                                     the removal
    models/NAME/promoting/...        marks that a version is being promoted
    models/NAME/claims/...           notes that give each number one owner, see `consensus`

The champion is the version of the newest promotion. Promotions are numbered consecutively, and each
number is assigned only once. Therefore one of two concurrent promotions fails, on any store.

A promotion writes its mark and then checks whether the version is being removed. A removal writes
the lineage and then checks for marks and promotions. Therefore at least one of two concurrent
operations notices the other.

Runs also read the registry: `opponent` returns the champion that the model is compared with, and
`champion_checkpoint` returns the checkpoint for a warm start.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flotilla.trainer import signing, storage
from flotilla.trainer.config.schema import OF_TWO_CLASSES
from flotilla.trainer.promotion.consensus import decide, find_decided
from flotilla.trainer.promotion.gate import publish_json
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.runtime.json_records import parse_mapping, parse_number, parse_record
from flotilla.trainer.storage import Manifest
from flotilla.trainer.storage.manifest import MANIFEST
from flotilla.trainer.storage.store import is_recent, run_parallel
from flotilla.trainer.storage.uri import locate, speaks_s3
from flotilla.trainer.tracking import mlflow_model

MODEL = "model"
PROMOTION = "promotion"
NAME = "name"
# Time in seconds after which an unfinished promotion or removal is considered abandoned.
_SECONDS = 3600.0
log = logging.getLogger(__name__)


class PromotionLostError(UserError):
    """Another promotion was made first, so nothing was promoted."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One registered version of a model."""

    number: int
    uri: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A promotion by a run or a person.

    `restores` is the number of the earlier promotion that a rollback repeats, or 0.
    """

    number: int
    uri: str
    version: int
    restores: int
    by: str
    created: str


def home(root: str, name: str) -> str:
    """Return the URI of the folder with all records of a model."""
    return storage.join(root, "registry", "models", name)


def names(root: str) -> list[str]:
    """Return the names of all registered models."""
    found = storage.list_published(storage.join(root, "registry", "names"), NAME)
    return [storage.name_of(uri) for uri, _ in found]


def versions(root: str, name: str) -> list[Version]:
    """Return the registered versions of a model, oldest first."""
    found = _records(storage.join(home(root, name), "versions"), MODEL, _VersionFields)
    return [
        Version(number=number, uri=each.uri, manifest=each.manifest)
        for number, each in _readable(found).items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Lineage:
    run_id: str = ""
    dataset: str = ""
    data_version: str = ""
    spans: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    reference: int = 0


@dataclass(frozen=True, kw_only=True)
class _VersionFields:
    version: int
    global_step: int = 0
    lineage: _Lineage = field(default_factory=_Lineage)
    made_from: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.version


@dataclass(frozen=True, kw_only=True)
class _PromotionFields:
    version: int
    predecessor: int
    restores: int
    by: str

    @property
    def number(self) -> int:
        return self.predecessor + 1


@dataclass(frozen=True, kw_only=True)
class _Record:
    uri: str
    manifest: Manifest
    fields: Any


def _records(
    above: str, kind: str, fields: type[_VersionFields] | type[_PromotionFields]
) -> dict[int, _Record | UserError]:
    """Return the records below `above` in order, keyed by number, or the error for a bad record."""

    def read(number: int) -> _Record | UserError:
        uri = _number_uri(above, number)
        try:
            manifest = storage.read_manifest(uri)
        except (storage.NotPublished, storage.Corrupt, storage.UnknownSchema) as error:
            return error
        found = parse_record(fields, dict(manifest.fields))
        # A folder that was copied to another number is not valid.
        if manifest.kind == kind and found and found.number == number:
            return _Record(uri=uri, manifest=manifest, fields=found)
        return storage.Corrupt(
            f"{uri}: {MANIFEST} does not describe {kind} {number}; delete the directory and "
            "create it again"
        )

    numbers = _numbers(above)
    return dict(zip(numbers, run_parallel(read, numbers), strict=True))


def _numbers(above: str) -> list[int]:
    found = ((name, parse_number(name)) for name in storage.names(above))
    return sorted(
        number
        for name, number in found
        if number and storage.name_of(_number_uri(above, number)) == name
    )


def _number_uri(above: str, number: int) -> str:
    return storage.join(above, f"{number:06d}")


def _readable(records: Mapping[int, _Record | UserError]) -> dict[int, _Record]:
    for each in records.values():
        if isinstance(each, UserError) and not isinstance(each, storage.NotPublished):
            log.warning("skipped: %s", each)
    return {number: each for number, each in records.items() if isinstance(each, _Record)}


def version(root: str, name: str, number: int) -> Version:
    """Return one version. Raises `ConfigError` if there is none with this number."""
    found = {each.number: each for each in versions(root, name)}
    if number not in found:
        known = ", ".join(map(str, found)) or "none"
        raise ConfigError(f"{name} has no version {number} below {root} (known: {known})")
    return found[number]


def find_source(version: Version) -> str:
    """Return the URI of the exported model that a version was copied from, or an empty string."""
    source = version.manifest.fields.get("source")
    return str(source.get("uri", "")) if isinstance(source, dict) else ""


def promotions(root: str, name: str) -> list[Promotion]:
    """Return all readable promotions of a model, oldest first.

    First, publish promotions that were decided but not published, for example because a process was
    killed or a folder was removed. Raises `UserError` if the newest promotion is unreadable,
    because an older promotion would give a wrong champion.
    """
    above = storage.join(home(root, name), "promotions")
    records = _records(above, PROMOTION, _PromotionFields)
    lacking = [
        number
        for number in _numbers(storage.join(home(root, name), "claims", "promotions"))
        if isinstance(records.get(number, storage.NotPublished()), storage.NotPublished)
    ]
    restored = [_restore_decided(root, name, number) for number in lacking]
    if any(restored):
        records = _records(above, PROMOTION, _PromotionFields)
    last = records[max(records)] if records else None
    if isinstance(last, UserError):
        raise storage.Corrupt(
            f"the newest promotion of {name} cannot be read, so its champion is unknown: {last}"
        )
    return [
        Promotion(
            number=number,
            uri=each.uri,
            version=each.fields.version,
            restores=each.fields.restores,
            by=each.fields.by,
            created=each.manifest.created,
        )
        for number, each in _readable(records).items()
    ]


def _restore_decided(root: str, name: str, number: int) -> bool:
    claim = storage.join(home(root, name), "claims", "promotions", f"{number:06d}")
    decided = find_decided(claim)
    if decided is None:
        return False
    found = parse_record(_PromotionFields, decided)
    if found is None or found.number != number:
        raise storage.Corrupt(
            f"{claim} does not contain promotion {number} of {name}; restore it from a backup"
        )
    _publish_promotion(root, name, number, decided)
    return True


def _predecessor(name: str, made: Mapping[int, Promotion], number: int) -> Promotion | None:
    if number > 1 and number - 1 not in made:
        raise UserError(
            f"promotion {number - 1} of {name} does not exist or cannot be read; restore it, "
            "or make a version the champion with `flotilla models promote`"
        )
    return made.get(number - 1)


def champion(root: str, name: str) -> Version | None:
    """Return the champion, or None before the first promotion. Raises `UserError`."""
    number = champion_number(root, name)
    return read_promoted(root, name, number) if number else None


def champion_number(root: str, name: str) -> int:
    """Return the version number of the champion, even if it was removed, or 0 if there is none."""
    made = promotions(root, name)
    return made[-1].version if made else 0


def read_promoted(root: str, name: str, number: int) -> Version:
    """Return a version that became champion. Raises `UserError` if it was removed."""
    try:
        return version(root, name, number)
    except UserError as error:
        remedy = "restore it, or make another version the champion with `flotilla models promote`"
        raise UserError(f"the champion no longer exists: {error}; {remedy}") from error


def register(
    root: str, name: str, model: str, *, lineage: Mapping[str, Any], scratch: Path
) -> Version:
    """Register a copy of a model, or return its existing version. Raises `UserError`."""
    there = storage.read_manifest(model)
    source = {"uri": model, "created": there.created}
    known = versions(root, name)
    for each in known:
        if each.manifest.fields.get("source") == source:
            return each
    number = known[-1].number + 1 if known else 1
    with tempfile.TemporaryDirectory(prefix="name-") as empty:
        uri = storage.join(root, "registry", "names", name)
        storage.publish(Path(empty), uri, kind=NAME, fields={"name": name})
    with tempfile.TemporaryDirectory(dir=scratch, prefix="version-") as folder:
        copy = Path(folder) / "model"
        # Leave out the export's signature, because the version is signed below.
        signing.fetch(model, copy, there, only=lambda _: True)
        served = copy / there.fields["saved_model"]
        while True:
            if _claim(root, name, "versions", number, source) != source:
                # Another model already claimed this number, so try the next one.
                number += 1
                continue
            uri = storage.join(home(root, name), "versions", f"{number:06d}")
            served = served.rename(served.with_name(str(number)))
            fields = {
                **there.fields,
                "saved_model": served.relative_to(copy).as_posix(),
                "version": number,
                "source": source,
                "lineage": dict(lineage),
            }
            _complete(copy, name, uri, fields, there.created)
            try:
                manifest = storage.publish(copy, uri, kind=MODEL, fields=fields)
            except storage.Conflict:
                # Another process of this run may have published the version. If so, use it.
                manifest = storage.read_manifest(uri)
                if manifest.fields.get("source") != source:
                    number += 1
                    continue
            return Version(number=number, uri=uri, manifest=manifest)


def _complete(copy: Path, name: str, uri: str, fields: Mapping[str, Any], created: str) -> None:
    (copy / "kserve.yaml").write_text(kserve_service(name, uri), encoding="utf-8")
    mlflow_model.write(copy, fields, read_kinds(fields))
    signing.write_provenance(copy, name, fields["lineage"], created)
    signing.sign(copy, fields)


def promote(  # noqa: PLR0913
    root: str, name: str, number: int, *, after: int, by: str, restores: int = 0
) -> Promotion:
    """Make a version the champion. Raises `UserError` if a promotion newer than `after` exists."""
    fields = {
        "version": number,
        "predecessor": after,
        "restores": restores,
        "by": by,
        # A random token distinguishes promotions whose other fields are equal.
        "token": secrets.token_hex(8),
    }
    with promoting(home(root, name), number):
        signing.verify(version(root, name, number).uri)
        if newest(root, name) > after:
            raise _lost(root, name, after)
        # Publish even a promotion that another process proposed, because it may have died.
        decided = _claim(root, name, "promotions", after + 1, fields)
        try:
            uri, created = _publish_promotion(root, name, after + 1, decided)
        except storage.Conflict:
            raise _lost(root, name, after) from None
        if decided != fields:
            raise _lost(root, name, after)
    return Promotion(
        number=after + 1, uri=uri, version=number, restores=restores, by=by, created=created
    )


def _publish_promotion(
    root: str, name: str, number: int, decided: Mapping[str, Any]
) -> tuple[str, str]:
    uri = storage.join(home(root, name), "promotions", f"{number:06d}")
    return uri, publish_json(decided, uri, kind=PROMOTION, fields=decided).created


def _claim(
    root: str, name: str, what: str, number: int, owner: Mapping[str, Any]
) -> dict[str, Any]:
    return decide(storage.join(home(root, name), "claims", what, f"{number:06d}"), owner)


def rollback(root: str, name: str, *, by: str) -> Promotion:
    """Make the previous champion the champion again. Repeated rollbacks go back further."""
    made = {each.number: each for each in promotions(root, name)}
    if not made:
        raise UserError(f"{name} has no champion below {root}{nearest(name, names(root))}")
    newest = made[max(made)]
    target = _predecessor(name, made, newest.restores or newest.number)
    if target is None:
        raise UserError(f"{name} had no champion before version {newest.version}")
    if target.version not in {each.number for each in versions(root, name)}:
        raise UserError(
            f"{name} no longer has version {target.version}, the champion before version "
            f"{newest.version}; make another version the champion with `flotilla models promote`"
        )
    restores = target.restores or target.number
    return promote(root, name, target.version, after=newest.number, by=by, restores=restores)


def newest(root: str, name: str) -> int:
    """Return the number of the newest promotion, or 0 if there is none."""
    made = promotions(root, name)
    return made[-1].number if made else 0


def _lost(root: str, name: str, after: int) -> PromotionLostError:
    other = next((each for each in promotions(root, name) if each.number == after + 1), None)
    what = (
        f"{other.by} promoted version {other.version}" if other else "another version was promoted"
    )
    return PromotionLostError(f"{name}: {what} in the meantime, so this promotion had no effect")


def champion_checkpoint(root: str, name: str) -> str:
    """Return the URI of the champion's checkpoint, or an empty string. Raises `UserError`."""
    found = champion(root, name)
    if found is None:
        return ""
    uri = str(found.manifest.fields.get("lineage", {}).get("checkpoint", ""))
    if not uri or not storage.is_published(uri):
        its = f"champion of {name} (version {found.number})"
        what = (
            f"checkpoint {uri} of the {its} no longer exists" if uri else f"{its} has no checkpoint"
        )
        raise UserError(
            f"training.warm_start: the {what}; set the URI of another checkpoint, or leave the key "
            "empty"
        )
    return uri


def champion_positive(root: str, name: str) -> dict[str, str]:
    """Return the positive class of each binary output of the champion, keyed by output name.

    A single output has an empty name. Raises `UserError`.
    """
    found = champion(root, name)
    if found is None:
        return {}
    with storage.check_form(f"the manifest of {found.uri}"):
        return positive_classes(found.manifest.fields, found.uri)


def positive_classes(fields: Mapping[str, Any], uri: str) -> dict[str, str]:
    """Return the positive class of each binary output of a model, keyed by output name.

    Models of earlier versions do not record this class. For them, it is the second class.
    """
    if "positive" in fields:
        said = fields["positive"]
        return dict(said) if isinstance(said, Mapping) else {"": said}
    kinds = read_kinds(fields)
    labels = {"": read_labels(uri), **fields.get("labels", {})}
    binary = [name for name, kind in kinds.items() if kind in OF_TWO_CLASSES]
    return {name: labels[name][1] for name in binary if len(labels.get(name, ())) > 1}


def read_kinds(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the kind of each output of a model. Earlier versions record only the task."""
    return fields.get("kinds") or {"": fields.get("task", "classification")}


def read_labels(model: str) -> list[str]:
    """Return the class names of a model, from the lines of `labels.txt`."""
    try:
        return storage.read_file(model, "labels.txt").decode(errors="replace").splitlines()
    except storage.Missing:
        return []


def reference(root: str, name: str, champion: Version) -> Version | None:
    """Return the last champion with a proven gain, or None if it is `champion` or was removed."""
    number = champion.manifest.fields.get("lineage", {}).get("reference", 0)
    return next((each for each in versions(root, name) if each.number == number), None)


def opponent(root: str, name: str, checkpoint: str) -> Version | None:
    """Return the champion to compare the model of a checkpoint with, or None.

    If the run was resumed after its promotion, the champion is this model. In this case, return the
    previous champion, so that the decision stays the same.
    """
    created = storage.read_manifest(checkpoint).created
    known = {each.number: each for each in versions(root, name)}
    all_made = {each.number: each for each in promotions(root, name)}
    made = all_made.get(max(all_made, default=0))
    while made:
        found = known.get(made.version) or read_promoted(root, name, made.version)
        origin = found.manifest.fields.get("made_from", {})
        if (origin.get("checkpoint"), origin.get("checkpoint_created")) != (checkpoint, created):
            return found
        made = _predecessor(name, all_made, made.number)
    return None


def read_retired(home: str) -> dict[int, Mapping[str, Any]]:
    """Return the lineage of each version that was removed or is being removed."""
    found: dict[int, Mapping[str, Any]] = {}
    for name in storage.names(storage.join(home, "retired")):
        if number := parse_number(name.removesuffix(".json")):
            lineage = _json(storage.join(home, "retired", name)).get("lineage", {})
            found[number] = lineage if parse_record(_Lineage, lineage) else dict[str, Any]()
    return found


def retire(home: str, number: int, lineage: Mapping[str, Any]) -> None:
    """Record the lineage of a version, and forbid its promotion."""
    tree = {"version": number, "at": time.time(), "lineage": dict(lineage)}
    storage.write_bytes(_record(home, number), json.dumps(tree).encode())


def restore(home: str, number: int) -> None:
    """Undo `retire`."""
    storage.delete(_record(home, number))


@contextmanager
def promoting(home: str, number: int) -> Iterator[None]:
    """Protect a version from removal within the context. Raises `UserError` if it is retired."""
    mark = storage.join(home, "promoting", f"{number:06d}-{secrets.token_hex(8)}.json")
    storage.write_bytes(mark, json.dumps({"at": time.time()}).encode())
    try:
        if is_recent(_json(_record(home, number)).get("at"), _SECONDS):
            raise UserError(
                f"version {number} is being removed by `flotilla gc`; promote another version, or "
                "try again in an hour if it still exists"
            )
        yield
    finally:
        storage.delete(mark)


def list_requested(root: str, name: str) -> list[int]:
    """Return the numbers of the versions that are being promoted."""
    above = storage.join(home(root, name), "promoting")
    marks = ((parse_number(mark.partition("-")[0]), mark) for mark in storage.names(above))
    return [
        number
        for number, mark in marks
        if number and is_recent(_json(storage.join(above, mark)).get("at"), _SECONDS)
    ]


def _record(home: str, number: int) -> str:
    return storage.join(home, "retired", f"{number:06d}.json")


def _json(uri: str) -> dict[str, Any]:
    try:
        return parse_mapping(storage.read_bytes(uri))
    except (storage.Missing, storage.Corrupt, ValueError):
        return {}


def kserve_service(name: str, uri: str) -> str:
    """Return the YAML of a KServe InferenceService for the model `name` published at `uri`."""
    document = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": service_name(name)},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "tensorflow"},
                    "storageUri": _storage_uri(storage.join(uri, "serving", name)),
                }
            }
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def _storage_uri(uri: str) -> str:
    if not speaks_s3(uri):
        return uri
    # Leave out the options of the URI, which only Flotilla's client understands.
    place = locate(uri)
    return f"s3://{place.bucket}/{place.key}"


def service_name(name: str) -> str:
    """Return a valid Kubernetes name for a service: lowercase letters, digits and `-`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name)
    return plain if plain[0].isalpha() else f"model-{plain}"
