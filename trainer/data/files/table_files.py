"""Select the files of a listing that form a table; infer splits and partitions from their paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from flotilla.trainer.config.data import DataConfig, SplitsConfig
from flotilla.trainer.data.files.formats.decompression import bare_name
from flotilla.trainer.data.splits import split_of_folder

# Name with which Hive and Spark mark a missing value.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_DOCUMENT = re.compile(
    r"(?:read[-_ ]?me|licen[cs]e|copying|notice|changelog|authors|citation|metadata|meta|schema|"
    r"(?:data[-_ ]?)?(?:description|dictionary)|columns|dataset[-_]?infos?|datapackage|croissant|"
    r"state|checksums?|(?:md5|sha\d+)sums?)(?:[-_. ].*)?\.(?:txt|json|jsonl)"
)
_ANSWERS = re.compile(r"submission|unlabel+ed|predict|hold[-_]?out|inference")
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(?:\.\d+)*")
_TABLES = (".csv", ".tsv")
# Numbers at the end, as in train-00000-of-00004.
_NUMBERED = re.compile(r"[-_.]\d+(?:-of-\d+)?$")


def drop_documents(files: Sequence[Any]) -> list[Any]:
    """Leave out documentation and empty files, unless only such files exist."""
    names = [bare_name(file.path.rpartition("/")[2]) for file in files]
    has_tables = any(name.endswith(_TABLES) for name in names)
    kept = [
        file
        for file, name in zip(files, names, strict=True)
        if file.size
        and not _DOCUMENT.fullmatch(name)
        and not (has_tables and name.endswith(".txt"))
    ]
    return kept or list(files)


def may_lack_label(file: Any) -> bool:
    """Return whether a file's name suggests that it lacks a label, as a test file may."""
    return _find_split(file.path) not in ("", "train") or answers_only(file)


def answers_only(file: Any) -> bool:
    """Return whether a file's name suggests that it has only examples or only answers."""
    return bool(_ANSWERS.search(file.path.lower()))


def find_index(names: Sequence[str], said: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a file declares as an index, or that have pandas' index names."""
    return tuple(each for each in names if each in said or _INDEX.fullmatch(each))


def split_by_names(config: DataConfig, files: Sequence[Any]) -> tuple[list[Any], str]:
    """Return files with the splits that their names or folders indicate, and a note on it.

    No split is inferred if splits are configured or files have spans. Otherwise, every file must
    belong to a split, and there must be files for training and for another split.
    """
    drawn = config.splits != SplitsConfig() or any(file.span or file.split for file in files)
    found = {} if drawn else {file.path: _find_split(file.path) for file in files}
    named = {split: path for path, split in reversed(found.items())}
    if "" in named or "train" not in named or len(named) < len(("train", "test")):
        return list(files), ""
    said = ", ".join(f"{path} is {split}" for split, path in sorted(named.items()))
    draw = "to draw the splits instead, set data.splits: {test: 0.1}"
    note = f"data.splits: by the names of the files, {said}; {draw}"
    return [replace(file, split=found[file.path]) for file in files], note


def _find_split(path: str) -> str:
    *folders, name = path.split("/")
    stem = Path(bare_name(name)).stem
    stems = (stem, _NUMBERED.sub("", stem))
    return next((split for each in (*folders, *stems) if (split := split_of_folder(each))), "")


def read_partition(file: Any) -> dict[str, str]:
    """Return the partition columns in the folders of a path, such as `kind=cat/`.

    The folder of a span is excluded, because it only selects the files to read.
    """
    found = {}
    for folder in file.path.split("/")[:-1]:
        name, mark, value = folder.partition("=")
        if name and mark and not _is_span(value, file.span):
            found[unquote(name)] = "" if value == _NO_VALUE else unquote(value)
    return found


def _is_span(value: str, span: str) -> bool:
    return bool(span) and value.replace("-", "").lstrip("0") == span.replace("-", "").lstrip("0")
