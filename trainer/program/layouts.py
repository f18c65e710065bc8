"""Finds complete checkpoints and models in the folders of a program.

The known layouts are checkpoints of `tf.train.Checkpoint` and `tf.compat.v1.train.Saver`, Keras
files, SavedModels and Orbax checkpoints. If a marker is configured, only folders that have the
marker file count. Only regular files in the folder count: reading a pipe would never end, and a
link out of the folder points elsewhere in another container.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.trainer.runtime.errors import UserError

TENSORFLOW, KERAS, ORBAX = "tensorflow", "keras", "orbax"
SAVED_MODEL, MARKER = "saved_model", "marker"
#: The name of TensorFlow's checkpoint state file, which names the newest checkpoint.
STATE = "checkpoint"
_KERAS = (".keras", ".h5", ".hdf5")
_OF_ORBAX = {"_CHECKPOINT_METADATA", "commit_success.txt", "_METADATA", "manifest.ocdbt"}
_TEMPORARY = re.compile(r"orbax-checkpoint-tmp|^\.|\.tmp$|~$|_temp$")
_NEWEST = re.compile(rb'^model_checkpoint_path: "(.+)"\s*$', re.MULTILINE)
_ESCAPED = re.compile(rb"\\(?:([0-3][0-7]{2})|(.))")
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_OF_BUNDLE = re.compile(r"(.*)\.(?:index|meta|data-\d{5}-of-(\d{5}))", re.DOTALL)
_NUMBER = re.compile(r"(?:^|[-_.])(\d+)(?=$|[-_.])")
_HDF5 = b"\x89HDF\r\n\x1a\n"
_MOST_STATE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A complete checkpoint or model.

    Attributes:
        files: the paths of its files, relative to the folder.
        number: the step in its name, or -1 if there is none.
        modified: Unix timestamp of its last change.
        signature: a string that changes if one of its files changes. `times` parses it.
        state: the path of the state file that names it, relative to the folder, or empty.
        prefix: its name in the state file.
    """

    layout: str
    files: tuple[Path, ...]
    number: int
    modified: float
    signature: str
    state: str = ""
    prefix: str = ""

    @property
    def is_committed(self) -> bool:
        """Whether the layout guarantees that the checkpoint will not be written to again."""
        return bool(self.state) or self.layout == ORBAX


def times(signature: str) -> dict[str, int]:
    """Return the modification times in a signature, in nanoseconds, keyed by the file's path."""
    _, _, parts = json.loads(signature)
    return {name: when for name, _, when in parts}


def find_newest(folder: Path, marker: str = "") -> Stored | None:
    """Return the newest complete checkpoint below a folder, or None."""
    found = list(_marked(folder, marker) if marker else _known(folder))
    return max(found, key=lambda each: (each.modified, each.number), default=None)


def find_model(folder: Path) -> Stored | None:
    """Return the newest complete Keras file or SavedModel below a folder, or None."""
    found = [each for each in _known(folder) if each.layout in (KERAS, SAVED_MODEL)]
    return max(found, key=lambda each: each.modified, default=None)


def is_empty(folder: Path) -> bool:
    """Return whether there are no files below a folder."""
    return not any(names for _, _, names in os.walk(folder))


def files_below(folder: Path) -> list[Path]:
    """Return the regular files below a folder, including links to files in the same folder."""
    return [here / name for here, _, names in _walk(folder, folder) for name in names]


def require_readable(folder: Path) -> None:
    """Raise `UserError` unless this process can read everything below a folder."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        is_folder = here.is_dir() and not here.is_symlink()
        if here.exists() and not os.access(here, os.R_OK | (os.X_OK if is_folder else 0)):
            raise UserError(
                f"cannot read {here}: Permission denied; make the program write files that other "
                "users can read, or run both containers of its pod as the same user with "
                "cluster.kubernetes.pod.security_context: {runAsUser: N}"
            )
        waiting += here.iterdir() if is_folder else ()


def _walk(folder: Path, top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder like `os.walk`. The caller may remove entries from the list of folders."""
    waiting = [folder]
    while waiting:
        here, folders, names = waiting.pop(), list[str](), list[str]()
        with suppress(OSError), os.scandir(here) as entries:
            for each in entries:
                if each.is_dir(follow_symlinks=False):
                    folders.append(each.name)
                elif each.is_file() and (not each.is_symlink() or _is_below(each.path, top)):
                    names.append(each.name)
        yield here, folders, names
        waiting += [here / name for name in folders]


def _is_below(path: str, top: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(top))


def _known(folder: Path) -> Iterator[Stored]:
    for here, folders, names in _walk(folder, folder):
        folders[:] = [each for each in folders if not _TEMPORARY.search(each)]
        if _OF_ORBAX & set(names):
            folders.clear()
            yield from _stored(folder, ORBAX, _below(here, folder), here.relative_to(folder))
        elif "saved_model.pb" in names:
            folders.clear()
            paths = _below(here, folder)
            variables = [each.name for each in paths if each.parent == here / "variables"]
            if "variables" in _list_bundles(variables):
                yield from _stored(folder, SAVED_MODEL, paths, here.relative_to(folder))
        else:
            yield from _of_tensorflow(folder, here, names)
            yield from _of_keras(folder, here, names)


def _marked(folder: Path, marker: str) -> Iterator[Stored]:
    for here, folders, names in _walk(folder, folder):
        if marker in names:
            folders.clear()
            yield from _stored(folder, MARKER, _below(here, folder), here.relative_to(folder))


def _below(here: Path, top: Path) -> list[Path]:
    return [where / name for where, _, names in _walk(here, top) for name in names]


def _stored(  # noqa: PLR0913, PLR0917
    folder: Path, layout: str, paths: list[Path], name: Path, state: str = "", prefix: str = ""
) -> Iterator[Stored]:
    """Yield the checkpoint with the sizes and times of its files, or nothing if a file is gone."""
    parts, modified = [], 0.0
    for path in sorted(paths):
        try:
            there = path.stat()
        except OSError:
            return
        parts.append([str(path.relative_to(folder)), there.st_size, there.st_mtime_ns])
        modified = max(modified, there.st_mtime)
    numbers = [int(found[-1]) for part in name.parts if (found := _NUMBER.findall(part)[:1])]
    yield Stored(
        layout=layout,
        files=tuple(path.relative_to(folder) for path in sorted(paths)),
        number=numbers[-1] if numbers else -1,
        modified=modified,
        signature=json.dumps([state, prefix, parts]),
        state=state,
        prefix=prefix,
    )


def _of_tensorflow(folder: Path, here: Path, names: list[str]) -> Iterator[Stored]:
    """Yield the checkpoint that the state file names or, if it is incomplete, all complete ones."""
    named, whole = _read_state(here / STATE) if STATE in names else "", _list_bundles(names)
    for prefix in {named} if named in whole else whole:
        paths = [here / name for name in whole[prefix]]
        state = str((here / STATE).relative_to(folder))
        yield from _stored(folder, TENSORFLOW, paths, Path(prefix), state, prefix)


def _of_keras(folder: Path, here: Path, names: list[str]) -> Iterator[Stored]:
    found: list[Stored] = []
    for name in names:
        if name.endswith(_KERAS) and not _TEMPORARY.search(name):
            found += _stored(folder, KERAS, [here / name], Path(Path(name).stem))
    for each in sorted(found, key=lambda each: (each.modified, each.number), reverse=True):
        if _is_whole_file(folder / each.files[0]):
            yield each
            return


def _read_state(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = _NEWEST.search(file.read(_MOST_STATE_BYTES))
        # Protobuf escapes quotes and non-ASCII bytes.
        name = _ESCAPED.sub(_unescape, found[1]).decode("utf-8") if found else ""
    except (OSError, ValueError):
        return ""
    # Return only the name, because the state file may contain an absolute path of another machine.
    return Path(name).name


def _unescape(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)]) if found[1] else _LETTERS.get(found[2], found[2])


def _list_bundles(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each complete TensorFlow checkpoint, keyed by its prefix."""
    files, of = defaultdict[str, list[str]](list), defaultdict[str, list[int]](list)
    for name in names:
        if found := _OF_BUNDLE.fullmatch(name):
            files[found[1]].append(name)
            of[found[1]] += [int(found[2])] if found[2] else []
    return {
        prefix: files[prefix]
        for prefix, counts in of.items()
        if f"{prefix}.index" in files[prefix] and counts and {*counts} == {len(counts)}
    }


def _is_whole_file(path: Path) -> bool:
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as file:
                return bool(file.namelist())
        with path.open("rb") as file:
            head = file.read(64)
        return _ends_at(head) == path.stat().st_size
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def _ends_at(head: bytes) -> int:
    """Return the size of an HDF5 file according to its superblock, or -1 if it is not HDF5."""
    # See the HDF5 File Format Specification, version 3, section II.A.
    if len(head) < 64 or not head.startswith(_HDF5):  # noqa: PLR2004
        return -1
    version, at = head[8], {0: (13, 24), 1: (13, 28), 2: (9, 12), 3: (9, 12)}
    if version not in at:
        return -1
    size, first = head[at[version][0]], at[version][1]
    # The superblock has the base address, the address of free space or of an extension, and the
    # end-of-file address, in this order.
    return int.from_bytes(head[first + 2 * size : first + 3 * size], "little")


def write_state(path: Path, prefix: str) -> None:
    """Write the state file that names a checkpoint as the newest. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"  # noqa: PLR2004
        for byte in prefix.encode()
    )
    text = f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n'
    path.write_text(text, encoding="ascii")
