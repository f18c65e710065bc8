"""Checkpoints and models in the folders of a program: which are there, and which are whole.

Known layouts are those of `tf.train.Checkpoint` and `tf.compat.v1.train.Saver`, Keras files,
SavedModel and Orbax. With a marker only folders that have the marker count.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TENSORFLOW, KERAS, ORBAX, SAVED_MODEL, MARKER = LAYOUTS = (
    "tensorflow", "keras", "orbax", "saved_model", "marker",
)  # fmt: skip
#: TensorFlow's record of the newest checkpoint in a folder.
STATE = "checkpoint"
_KERAS = (".keras", ".h5", ".hdf5")
_OF_ORBAX = {"_CHECKPOINT_METADATA", "commit_success.txt", "_METADATA", "manifest.ocdbt"}
_TEMPORARY = re.compile(r"orbax-checkpoint-tmp|^\.|\.tmp$|~$|_temp$")
_NEWEST = re.compile(r'^model_checkpoint_path: "(.+)"\s*$', re.MULTILINE)
_DATA = re.compile(r"\.data-\d{5}-of-(\d{5})$")
_NUMBER = re.compile(r"(?:^|[-_.])(\d+)(?=$|[-_.])")
_HDF5 = b"\x89HDF\r\n\x1a\n"
_MOST_STATE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint or a model that is whole.

    Attributes:
        files: its paths relative to the folder.
        number: the step in its name; -1 if there is none.
        modified: the Unix time of its last change.
        signature: changes when one of its files does.
        state: the path of TensorFlow's record that names it, relative to the folder, or empty.
        prefix: its name in that record.
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
        """Whether its layout says that nothing will be written to it any more."""
        return bool(self.state) or self.layout == ORBAX


def find_newest(folder: Path, marker: str = "") -> Stored | None:
    """Return the newest whole checkpoint below a folder; None if there is none."""
    found = list(_marked(folder, marker) if marker else _known(folder))
    return max(found, key=lambda each: (each.modified, each.number), default=None)


def find_model(folder: Path) -> Stored | None:
    """Return the newest whole Keras file or SavedModel below a folder."""
    found = [each for each in _known(folder) if each.layout in (KERAS, SAVED_MODEL)]
    return max(found, key=lambda each: each.modified, default=None)


def is_empty(folder: Path) -> bool:
    """Return whether there is no file below a folder."""
    return not any(names for _, _, names in os.walk(folder))


def _known(folder: Path) -> Iterator[Stored]:
    for where, folders, names in os.walk(folder):
        here = Path(where)
        folders[:] = [each for each in folders if not _TEMPORARY.search(each)]
        if _OF_ORBAX & set(names):
            folders.clear()
            yield from _stored(folder, ORBAX, _below(here), here.relative_to(folder))
        elif "saved_model.pb" in names:
            folders.clear()
            if _is_whole_bundle(here / "variables", "variables"):
                yield from _stored(folder, SAVED_MODEL, _below(here), here.relative_to(folder))
        else:
            yield from _of_tensorflow(folder, here, names)
            for path in (here / name for name in names if name.endswith(_KERAS)):
                if not _TEMPORARY.search(path.name) and _is_whole_file(path):
                    yield from _stored(folder, KERAS, [path], Path(path.stem))


def _marked(folder: Path, marker: str) -> Iterator[Stored]:
    for where, folders, names in os.walk(folder):
        if marker in names:
            folders.clear()
            here = Path(where)
            yield from _stored(folder, MARKER, _below(here), here.relative_to(folder))


def _below(folder: Path) -> list[Path]:
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names]


def _stored(  # noqa: PLR0913, PLR0917
    folder: Path, layout: str, paths: list[Path], name: Path, state: str = "", prefix: str = ""
) -> Iterator[Stored]:
    """Yield it with sizes and times; nothing if a file vanished meanwhile."""
    parts, modified = [], 0.0
    for path in sorted(paths):
        try:
            there = path.stat()
        except OSError:
            return
        parts.append(f"{path.relative_to(folder)} {there.st_size} {there.st_mtime_ns}")
        modified = max(modified, there.st_mtime)
    numbers = [int(found[-1]) for part in name.parts if (found := _NUMBER.findall(part)[:1])]
    yield Stored(
        layout=layout,
        files=tuple(path.relative_to(folder) for path in sorted(paths)),
        number=numbers[-1] if numbers else -1,
        modified=modified,
        signature="\n".join([state, prefix, *parts]),
        state=state,
        prefix=prefix,
    )


def _of_tensorflow(folder: Path, here: Path, names: list[str]) -> Iterator[Stored]:
    """Yield the checkpoint that the state file names; without one, those that are there."""
    named = _read_state(here / STATE) if STATE in names else ""
    if STATE in names and not named:
        return
    found = [each.removesuffix(".index") for each in names if each.endswith(".index")]
    for prefix in [named] if named else found:
        if _is_whole_bundle(here, prefix):
            of_it = (f"{prefix}.index", f"{prefix}.meta", f"{prefix}.data-")
            paths = [here / name for name in names if name.startswith(of_it)]
            state = str((here / STATE).relative_to(folder))
            yield from _stored(folder, TENSORFLOW, paths, Path(prefix), state, prefix)


def _read_state(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_STATE_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return ""
    found = _NEWEST.search(text)
    # It may be an absolute path of another machine.
    return Path(found[1]).name if found else ""


def _is_whole_bundle(folder: Path, prefix: str) -> bool:
    """Return whether the index and all data files of a TensorFlow checkpoint are there."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    parts = [each for name in names if (each := name.removeprefix(prefix)) != name]
    of = {int(found[1]) for each in parts if (found := _DATA.fullmatch(each))}
    data = [each for each in parts if _DATA.fullmatch(each)]
    return ".index" in parts and len(of) == 1 and len(data) == max(of)


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
    """Return the size of an HDF5 file by its superblock; -1 if it is none."""
    # The HDF5 File Format Specification, version 3, section II.A.
    if len(head) < 64 or not head.startswith(_HDF5):  # noqa: PLR2004
        return -1
    version, at = head[8], {0: (13, 24), 1: (13, 28), 2: (9, 12), 3: (9, 12)}
    if version not in at:
        return -1
    size, first = head[at[version][0]], at[version][1]
    # The third of the addresses: base, free space or extension, end of file.
    return int.from_bytes(head[first + 2 * size : first + 3 * size], "little")


def write_state(path: Path, prefix: str) -> None:
    """Write TensorFlow's record that names one checkpoint next to it; raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'
    path.write_text(text, encoding="utf-8")
