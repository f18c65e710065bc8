"""Publishes the user's modules as a bundle that is named by its digest, and loads it in a step."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.code.collect import IGNORE_FILE, Collected, Found, collect
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse

KIND = "code"
FOLDER = "code"
_MODULE = re.compile(r"([^./]+)(\.py)?")
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A published bundle. Its URI ends with its digest. `remarks` are messages to the user."""

    uri: str
    files: int
    bytes: int
    remarks: tuple[str, ...] = ()


def compute_digest(contents: Mapping[str, str]) -> str:
    """Return the digest of a bundle. `contents` has the files' SHA-256 digests, keyed by path."""
    text = json.dumps(sorted(contents.items()), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def publish(folder: Path, root: str) -> Bundle:
    """Publish the modules of a folder below `root`, if they are new. Raises `UserError`."""
    collected = collect(folder)
    with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
        hashes = {each.path: _copy(each, Path(scratch)) for each in collected.files}
        digest = compute_digest(hashes)
        uri = storage.join(root, FOLDER, digest)
        manifest = storage.publish(Path(scratch), uri, kind=KIND, fields={"digest": digest})
    return Bundle(
        uri=uri,
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        remarks=tuple(_remarks(collected)),
    )


def _copy(found: Found, scratch: Path) -> str:
    """Copy a file, and return its SHA-256 digest. Raises `UserError` if it changes meanwhile."""
    try:
        with found.file.open("rb") as file:
            before = os.fstat(file.fileno())
            data = file.read(found.bytes + 1)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise UserError(f"--code: cannot read {found.file}: {error.strerror}") from None
    moments = [(each.st_size, each.st_mtime_ns) for each in (before, after)]
    if len(data) != found.bytes or moments[0] != moments[1]:
        raise UserError(f"--code: {found.path} changed while it was read; run the command again")
    target = scratch / found.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as error:
        raise UserError(f"cannot write below {scratch.parent}: {error.strerror}") from None
    return hashlib.sha256(data).hexdigest()


def _remarks(collected: Collected) -> list[str]:
    remarks = []
    if collected.secrets:
        some = ", ".join(collected.secrets[:_NAMED])
        more = len(collected.secrets) - _NAMED
        some += f" and {more} more" if more > 0 else ""
        remarks.append(
            f"--code leaves out {some}, whose names look like secrets; to include one, add a line "
            f"!NAME to {IGNORE_FILE}"
        )
    remarks += [
        f"--code leaves out {name}/ by default, although it has modules; to include it, add a line "
        f"!/{name}/ to {IGNORE_FILE}"
        for name in collected.modules_left_out
    ]
    names = {found.path.partition("/")[0] for found in collected.files if _is_module(found.path)}
    return remarks + [line for name in sorted(names) if (line := _shadow(name))]


def _is_module(path: str) -> bool:
    first, *below = path.split("/")
    found = _MODULE.fullmatch(first)
    return path.endswith(".py") and bool(found) and bool(below) != bool(found and found[2])


def _shadow(name: str) -> str:
    top = name.removesuffix(".py")
    if hidden := user_code.hidden(top):
        return f"--code: a run cannot import {name}: {hidden}"
    installed = [sysconfig.get_path(each) for each in ("purelib", "platlib")]
    try:
        spec = PathFinder.find_spec(top, installed)
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin:
        return ""
    return (
        f"--code: {name} has the same name as an installed package ({spec.origin}), which Python "
        "imports instead wherever it is installed; rename your module"
    )


def load_bundle(text: str) -> Config:
    """Parse the configuration of a step and load its bundle. Raises `UserError`."""
    config = Config.model_validate_json(text)
    enter(config.code)
    return config


def enter(uri: str) -> None:
    """Download a bundle, and add it to this process's module path. Ignore an empty `uri`."""
    if not uri:
        return
    digest = storage.name_of(uri)
    folder = _scratch() / digest
    try:
        manifest = storage.fetch(uri, folder)
    except storage.NotPublished:
        raise ConfigError(
            f"code: there is no bundle at {uri}: it was deleted, or this machine cannot reach "
            "the store; submit the run again with --code"
        ) from None
    hashes = {each.path: _hash(folder / each.path) for each in manifest.files}
    if compute_digest(hashes) != digest:
        # Remove the folder, so that the next process downloads the bundle again.
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"code: {uri} was changed after it was published: its content does not match its "
            "digest; delete it, and submit the run again with --code"
        )
    os.environ.update({user_code.FOLDER_VARIABLE: str(folder), user_code.BUNDLE_VARIABLE: uri})


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"code: cannot read {path}: {error.strerror}") from None


def _scratch() -> Path:
    folder = Path(tempfile.gettempdir(), f"flotilla-code-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_ours and not status.st_mode & 0o022:
            return folder
        return Path(tempfile.mkdtemp(prefix="flotilla-code-"))
    except OSError as error:
        raise UserError(
            f"cannot write below {folder.parent}: {error.strerror}; free some space, or set TMPDIR"
        ) from None


#: The name of the file that lists the bundles of a run, and the name of the folder with a file for
#: each schedule.
OF_RUN = "code.json"
OF_SCHEDULES = "code-of-schedules"


def note_run(root: str, run_id: str, bundle: str) -> None:
    """Record that a run uses a bundle, in addition to earlier bundles. Raises `UserError`."""
    uri = storage.join(root, run_id, OF_RUN)
    with suppress(storage.Missing):
        if bundle in (noted := _parse_note(storage.read_bytes(uri))):
            return
        storage.write_bytes(uri, _note([*noted, bundle]))
        return
    storage.write_bytes(uri, _note([bundle]))


def note_schedule(bundle: str, schedule: str) -> None:
    """Record that a schedule uses a bundle. `schedule` identifies the schedule and its instance."""
    storage.write_bytes(_place(bundle, schedule), _note([bundle]))


def forget_schedule(bundle: str, schedule: str) -> None:
    """Remove the record that a schedule uses a bundle. If this fails, the bundle is kept longer."""
    with suppress(UserError):
        storage.delete(_place(bundle, schedule))


def _parse_note(data: bytes) -> list[str]:
    try:
        tree = parse(data)
    except ValueError:
        return []
    found = tree.get("bundles", []) if isinstance(tree, dict) else []
    return [each for each in found if isinstance(each, str)]


def _note(bundles: list[str]) -> bytes:
    return json.dumps({"bundles": bundles}).encode()


def _place(bundle: str, schedule: str) -> str:
    root = storage.parent_of(storage.parent_of(bundle))
    name = hashlib.sha256(f"{schedule}\n{bundle}".encode()).hexdigest()[:24]
    return storage.join(root, OF_SCHEDULES, f"{name}.json")
