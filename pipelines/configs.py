"""The example configurations and the example table in the package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from flotilla.trainer.runtime.errors import ConfigError, nearest

# A table has no comment that describes it.
_TABLES = {
    "tumors.csv": "569 tumours by 30 measures of their cells; the column to predict is diagnosis."
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A file of the package, and its description in a sentence."""

    name: str
    description: str


def list_examples() -> tuple[Example, ...]:
    """Return the example files of the package, configurations first."""
    found = sorted(files("flotilla").joinpath("configs").iterdir(), key=lambda each: each.name)
    configurations = [
        Example(name=each.name, description=_first_sentence(each.read_text(encoding="utf-8")))
        for each in found
        if each.name.endswith(".yaml")
    ]
    tables = [Example(name=name, description=text) for name, text in _TABLES.items()]
    return (*configurations, *tables)


def copy_example(name: str, folder: str | Path = ".") -> Path:
    """Copy an example by name, with or without extension, into a folder; return its path.

    Raises:
        ConfigError: there is no such example, or the folder has a file of this name.
    """
    every = [each.name for each in list_examples()]
    names = {key: each for each in every for key in (each, Path(each).stem)}
    if name not in names:
        hint = nearest(name, names) or "; `flotilla configs` lists them"
        raise ConfigError(f"Flotilla has no example {name!r}{hint}")
    path = Path(folder, names[name])
    content = files("flotilla").joinpath("configs", path.name).read_bytes()
    try:
        # The file is opened exclusively, so that a user's file is never overwritten.
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise ConfigError(f"{path} exists; rename or remove it first") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(number, "wb") as file:
        file.write(content)
    return path


def _first_sentence(text: str) -> str:
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return f"{' '.join(comment).partition('. ')[0].rstrip('.')}."
