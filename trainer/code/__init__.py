"""Collects the user's modules in a bundle that is named by its digest, and loads it in a step."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
import shutil
import stat
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from pathspec import GitIgnoreSpec

from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse

KIND = "code"
FOLDER = "code"
_MODULE = re.compile(r"([^./]+)(\.py)?")
_NAMED = 5
IGNORE_FILE = ".flotillaignore"
#: Patterns of files that are left out by default: they are not code, or are generated.
DEFAULTS = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.pyo", ".venv", "/venv/", "/runs/", "/data/",
    ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".tox", ".nox", ".idea",
    ".vscode", "node_modules", "*.egg-info", ".DS_Store", ".*.part", "/MANIFEST.json",
)  # fmt: skip
#: Patterns of the names of files that probably contain secrets.
SECRETS = (
    ".env", ".env.*", "*.env", "credentials", "credentials.json", "credentials.y*ml",
    "credentials.ini", "credentials.toml", "client_secret*.json", "service[-_]account*.json",
    "secrets.json", "secrets.y*ml", "secrets.toml", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks",
    "*.keytab", "*.kubeconfig", "kubeconfig", ".netrc", "_netrc", ".pypirc", ".pgpass",
    ".git-credentials", ".boto", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".ssh", ".aws",
    ".kube", ".gnupg", ".docker", "gcloud",
)  # fmt: skip
MOST_BYTES = 10 << 20
MOST_FILES = 2000
# Maximum number of folders to search. The limit matters if a user passes a home directory.
_MOST_FOLDERS = 10_000
_SECRET = "a secret by its name"
_DEFAULT = "default"


class Rules:
    """Rules in the syntax of `.gitignore`, with their origins. The last matching rule wins."""

    def __init__(self, rules: Iterable[tuple[str, str]]) -> None:
        """Store rules with their origins. As in git, an empty or invalid rule has no effect."""
        self._rules = [each for each in rules if _is_pattern(each[0])]
        self._spec = GitIgnoreSpec.from_lines(line for line, _ in self._rules)

    def leaving_out(self, path: str, *, is_folder: bool) -> str:
        """Return the origin of the rule that leaves out a path, or "" if the path is kept."""
        found = self._spec.check_file(f"{path}/" if is_folder else path)
        if not found.include or found.index is None:
            return ""
        # A rule `folder/**` matches the content of the folder, but not the folder itself.
        if is_folder and self._rules[found.index][0].endswith("/**"):
            return ""
        return self._rules[found.index][1]


def _is_pattern(line: str) -> bool:
    try:
        return bool(GitIgnoreSpec.from_lines([line]).patterns)
    # An invalid range, such as `[z-a]`, raises an error.
    except (ValueError, re.error):
        return False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file of a bundle: its location, and its path in the bundle, with forward slashes."""

    path: str
    file: Path
    bytes: int


@dataclass(kw_only=True)
class Collected:
    """The files of a bundle, sorted by path, and the skipped paths to report to the user."""

    files: list[Found] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    modules_left_out: list[str] = field(default_factory=list)


def collect(folder: Path) -> Collected:
    """Return the files of a user's folder that belong in its bundle. Raises `ConfigError`."""
    _require_folder(folder)
    root = Path(os.path.realpath(folder))
    collected = Collected()
    for found in _walk(root, _rules(root), collected):
        collected.files.append(found)
        if len(collected.files) > MOST_FILES:
            raise ConfigError(
                f"--code {folder}: the folder has more than {MOST_FILES:,} files, which is the "
                f"maximum (most are below {_list_largest(collected.files)}); give the folder of "
                f"your modules, or list the other files in {IGNORE_FILE}"
            )
    _require_size(folder, collected.files)
    if not any(each.path.endswith(".py") for each in collected.files):
        names = ", ".join(collected.modules_left_out)
        left = f" except in {names} (left out by default)" if names else ""
        raise ConfigError(
            f"--code {folder}: the folder has no module (*.py){left}; give the folder of your "
            "modules"
        )
    collected.files.sort(key=lambda each: each.path)
    return collected


def _require_folder(folder: Path) -> None:
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a valid path"
        raise ConfigError(f"--code {str(folder)!r}: {reason}; give a folder") from None
    if not is_folder:
        raise ConfigError(f"--code {folder}: it is a file; give its folder")


def _rules(root: Path) -> Rules:
    own = root / IGNORE_FILE
    lines: list[str] = []
    if os.path.lexists(own):
        try:
            lines = own.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"--code: cannot read {own}: {reason}") from None
    ordered = (
        (DEFAULTS, _DEFAULT), (SECRETS, _SECRET), ((f"/{IGNORE_FILE}",), _DEFAULT),
        (lines, IGNORE_FILE),
    )  # fmt: skip
    return Rules((line, origin) for rules, origin in ordered for line in rules)


def _walk(root: Path, rules: Rules, collected: Collected) -> Iterator[Found]:
    left, seen = [""], 0
    while left:
        above = left.pop()
        seen += 1
        if seen > _MOST_FOLDERS:
            raise ConfigError(
                f"--code {root}: the folder has more than {_MOST_FOLDERS:,} folders, which is the "
                "maximum; give the folder of your modules, or list the other folders in "
                f"{IGNORE_FILE}"
            )
        for entry in _entries(root / above):
            path = f"{above}/{entry.name}" if above else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if origin := rules.leaving_out(path, is_folder=is_folder):
                _note_skipped(collected, origin, path, Path(entry.path))
            elif is_folder:
                left.append(path)
            else:
                yield _check_file(root, path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"--code: cannot read {folder}: {error.strerror}") from None


def _note_skipped(collected: Collected, origin: str, path: str, place: Path) -> None:
    if origin == _SECRET:
        collected.secrets.append(path)
    # Report this folder, because it may be a package of the user.
    if origin == _DEFAULT and path in ("data", "runs", "venv") and any(place.glob("*.py")):
        collected.modules_left_out.append(path)


def _check_file(root: Path, path: str) -> Found:
    remedy = f"or exclude it with a line in {IGNORE_FILE}"
    if not path.isprintable() or "\\" in path:
        raise ConfigError(
            f"--code: {path!r} has characters that a store rejects; rename it, {remedy}"
        )
    place = root / path
    try:
        real = Path(os.path.realpath(place, strict=True))
        status = real.stat()
    except OSError as error:
        reason = "a broken link" if place.is_symlink() else error.strerror
        raise ConfigError(f"--code: cannot read {place}: {reason}; remove it, {remedy}") from None
    if not real.is_relative_to(root):
        raise ConfigError(
            f"--code: {path} is a link to {real}, outside the folder; replace it with a copy of "
            f"its target, {remedy}"
        )
    if not stat.S_ISREG(status.st_mode):
        what = (
            "a link to a folder" if stat.S_ISDIR(status.st_mode) else "neither a file nor a folder"
        )
        raise ConfigError(f"--code: {path} is {what}; remove it, {remedy}")
    return Found(path=path, file=real, bytes=status.st_size)


def _list_largest(files: list[Found]) -> str:
    counts = Counter(each.path.partition("/")[0] for each in files)
    return ", ".join(name for name, _ in counts.most_common(_NAMED))


def _require_size(folder: Path, files: list[Found]) -> None:
    total = sum(each.bytes for each in files)
    if total <= MOST_BYTES:
        return
    largest = heapq.nlargest(_NAMED, files, key=lambda each: each.bytes)
    named = ", ".join(f"{each.path} ({each.bytes / 1e6:.1f} MB)" for each in largest)
    raise ConfigError(
        f"--code {folder}: the files total {total / 1e6:.1f} MB, and the limit is "
        f"{MOST_BYTES / 1e6:.1f} MB; list large files in {IGNORE_FILE} (the largest are {named})"
    )


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
    noted: list[str] = []
    with suppress(storage.Missing):
        noted = _parse_note(storage.read_bytes(uri))
    if bundle not in noted:
        storage.write_bytes(uri, _note([*noted, bundle]))


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
