"""The example configurations and the example table that the package contains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from flotilla.trainer.runtime.errors import ConfigError, nearest

# The description of each CSV table. Unlike a YAML file, a table cannot contain it in a comment.
_TABLES = {
    "tumors.csv": "569 tumours, each with 30 measurements of its cells; the label is diagnosis."
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example file of the package, with a one-sentence description."""

    name: str
    description: str


def list_examples() -> tuple[Example, ...]:
    """Return the package's example files, configurations first."""
    found = sorted(files("flotilla").joinpath("configs").iterdir(), key=lambda each: each.name)
    configurations = [
        Example(name=each.name, description=_first_sentence(each.read_text(encoding="utf-8")))
        for each in found
        if each.name.endswith(".yaml")
    ]
    tables = [Example(name=name, description=text) for name, text in _TABLES.items()]
    return (*configurations, *tables)


def copy_example(name: str, folder: str | Path = ".") -> Path:
    """Copy an example into a folder, and return its path. The extension may be omitted.

    Raises:
        ConfigError: there is no such example, or the folder already has a file of that name.
    """
    every = [each.name for each in list_examples()]
    names = {key: each for each in every for key in (each, Path(each).stem)}
    if name not in names:
        hint = nearest(name, names) or "; `flotilla configs` lists the examples"
        raise ConfigError(f"Flotilla has no example {name!r}{hint}")
    path = Path(folder, names[name])
    content = files("flotilla").joinpath("configs", path.name).read_bytes()
    try:
        # Open the file exclusively, so that a user's file is never overwritten.
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
