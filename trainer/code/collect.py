"""Collects the files of a bundle from a user's folder, and leaves out or rejects other files."""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pathspec import GitIgnoreSpec

from flotilla.trainer.runtime.errors import ConfigError, UserError

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
_NAMED = 5
_SECRET = "a secret by its name"
_DEFAULT = "default"


class Rules:
    """Rules in the syntax of `.gitignore`, with their origins. The last matching rule wins."""

    def __init__(self) -> None:
        """Start without rules."""
        self._lines: list[str] = []
        self._origins: list[str] = []
        self._spec = GitIgnoreSpec.from_lines([])

    def add(self, lines: Iterable[str], origin: str) -> None:
        """Add rules. As in git, an empty or invalid line has no effect."""
        for line in filter(_is_pattern, lines):
            self._lines.append(line)
            self._origins.append(origin)
        self._spec = GitIgnoreSpec.from_lines(self._lines)

    def leaving_out(self, path: str, *, is_folder: bool) -> str:
        """Return the origin of the rule that leaves out a path, or "" if the path is kept."""
        found = self._spec.check_file(f"{path}/" if is_folder else path)
        if not found.include or found.index is None:
            return ""
        # A rule `folder/**` matches the content of the folder, but not the folder itself.
        if is_folder and self._lines[found.index].endswith("/**"):
            return ""
        return self._origins[found.index]


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
        raise ConfigError(
            f"--code {folder}: the folder has no module (*.py){_name_left_out(collected)}; give "
            "the folder of your modules"
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


def _name_left_out(collected: Collected) -> str:
    names = ", ".join(collected.modules_left_out)
    return f" except in {names} (left out by default)" if names else ""


def _rules(root: Path) -> Rules:
    own = root / IGNORE_FILE
    lines: list[str] = []
    if os.path.lexists(own):
        try:
            lines = own.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"--code: cannot read {own}: {reason}") from None
    rules = Rules()
    rules.add(DEFAULTS, _DEFAULT)
    rules.add(SECRETS, _SECRET)
    rules.add([f"/{IGNORE_FILE}"], _DEFAULT)
    rules.add(lines, IGNORE_FILE)
    return rules


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
                _note(collected, origin, path, Path(entry.path))
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


def _note(collected: Collected, origin: str, path: str, place: Path) -> None:
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
