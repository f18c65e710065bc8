"""Which files of a listing are the table, and what their paths say of them: splits, partitions."""

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

# What Hive and Spark write for a value that is missing.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_DOCUMENT = re.compile(
    r"(?:read[-_ ]?me|licen[cs]e|copying|notice|changelog|authors|citation|metadata|meta|schema|"
    r"(?:data[-_ ]?)?(?:description|dictionary)|columns|dataset[-_]?infos?|datapackage|croissant|"
    r"state|checksums?|(?:md5|sha\d+)sums?)(?:[-_. ].*)?\.(?:txt|json|jsonl)"
)
_ANSWERS = re.compile(r"submission|unlabel+ed|predict|hold[-_]?out|inference")
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(?:\.\d+)*")
_TABLES = (".csv", ".tsv")
# As in train-00000-of-00004.
_NUMBERED = re.compile(r"[-_.]\d+(?:-of-\d+)?$")


def drop_documents(files: Sequence[Any]) -> list[Any]:
    """Leave out what only describes a table, and empty files, where others are left."""
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
    """Say whether a file is one that often has no label, by its name: as that of a contest."""
    return _split_of(file.path) not in ("", "train") or answers_only(file)


def answers_only(file: Any) -> bool:
    """Say whether a file holds answers and no examples, by its name."""
    return bool(_ANSWERS.search(file.path.lower()))


def find_index(names: Sequence[str], said: Sequence[str]) -> tuple[str, ...]:
    """Return which columns are an index: a file says so, or pandas has named them."""
    return tuple(each for each in names if each in said or _INDEX.fullmatch(each))


def split_by_names(config: DataConfig, files: Sequence[Any]) -> tuple[list[Any], str]:
    """Return files with the splits that their names or folders say, and a note of it.

    Where the configuration says anything of splits, or one of the files is of none, there are none.
    """
    drawn = config.splits != SplitsConfig() or any(file.span or file.split for file in files)
    found = {} if drawn else {file.path: _split_of(file.path) for file in files}
    named = {split: path for path, split in reversed(found.items())}
    if "" in named or "train" not in named or len(named) < len(("train", "test")):
        return list(files), ""
    said = ", ".join(f"{path} is {split}" for split, path in sorted(named.items()))
    note = f"data.splits: by the names of the files {said}; set data.splits: {{test: 0.1}} to draw"
    return [replace(file, split=found[file.path]) for file in files], note


def _split_of(path: str) -> str:
    *folders, name = path.split("/")
    stem = Path(bare_name(name)).stem
    stems = (stem, _NUMBERED.sub("", stem))
    return next((split for each in (*folders, *stems) if (split := split_of_folder(each))), "")


def read_partition(file: Any) -> dict[str, str]:
    """Return the columns that the folders of a file have the values of, as `kind=cat/`.

    That of a delivery is none: it tells which files are read.
    """
    found = {}
    for folder in file.path.split("/")[:-1]:
        name, mark, value = folder.partition("=")
        if name and mark and not _is_span(value, file.span):
            found[unquote(name)] = "" if value == _NO_VALUE else unquote(value)
    return found


def _is_span(value: str, span: str) -> bool:
    return bool(span) and value.replace("-", "").lstrip("0") == span.replace("-", "").lstrip("0")
