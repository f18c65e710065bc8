"""Hostile input files for the rows of the table, each created when a row names it."""

import os
from collections.abc import Callable
from pathlib import Path

RUN = "digits-20250101-000000-aaaa"
DAMAGED = "digits-20250102-000000-bbbb"
# Nested aliases expand to 43 million strings.
BOMB = "".join(
    f"{name}: &{name} [{','.join([below] * 9)}]\n"
    for name, below in zip("abcdefgh", ("x", *(f"*{each}" for each in "abcdefg")), strict=True)
)
CONTENT: dict[str, str | bytes] = {
    "empty.yaml": "",
    "binary.yaml": b"\xff\xfe\x00\x01",
    "nul.yaml": "name: a\0b\n",
    "list.yaml": "- 1\n",
    "number.yaml": "5\n",
    "text.yaml": "hello\n",
    "unknown.yaml": "trainig: {steps: 5}\n",
    "twice.yaml": "training: {steps: 5}\ntraining: {steps: 6}\n",
    "inner.yaml": "training:\n  steps: 5\n  steps: 6\n",
    "broken.yaml": "training: {steps: 5\n",
    "tab.yaml": "training:\n\tsteps: 5\n",
    "tag.yaml": 'training: !!python/object/apply:os.system ["touch executed"]\n',
    "anchor.yaml": "a: *b\n",
    "bom.yaml": "\ufefftraining: {steps: x}\n",
    "utf16.yaml": "training: {steps: 5}\n".encode("utf-16"),
    "two.yaml": "name: a\n---\nname: b\n",
    "keys.yaml": "training: {5: 6}\n",
    "null.yaml": "training: null\n",
    "nulls.yaml": "training: {steps: null}\n",
    "deep.yaml": "[" * 2000,
    "merge.yaml": "a: &a {b: *a}\n",
    "self.yaml": "a: &a [*a]\n",
    "complex.yaml": "? [1, 2]\n: 3\n",
    "long.yaml": f"name: {'x' * 100_000}\n",
    "unicode.yaml": "naïve: 1\n",
    "reversed.yaml": 'name: "\u202edigits"\n',
    "surrogate.yaml": 'name: "\\ud800"\n',
    "bomb.yaml": BOMB,
    "plain": "x\n",
    "bad.pem": "no certificate\n",
    "lines.txt": "abc\r\ndef\n",
    "unicode.txt": "tök€n\n",
    "nothing.txt": "",
    "pipeline.yaml": "a: b\n",
    "compiled.yaml": (
        "components: {}\npipelineInfo: {name: p}\nroot: {}\n"
        "schemaVersion: 2.1.0\nsdkVersion: kfp-2.17.0\n"
    ),
    f"kept/{RUN}/config.json": "{}",
    f"kept/{DAMAGED}/config.json": "{",
}


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        # The file is sparse, so it takes no disk space.
        file.truncate(1 << 32)


OTHERS: dict[str, Callable[[Path], None]] = {
    "folder.yaml": Path.mkdir,
    "fifo.yaml": os.mkfifo,
    "huge.yaml": _huge,
    "loop.yaml": lambda path: path.symlink_to(path),
}


def prepare(words: str, folder: Path) -> None:
    """Create the files below `folder` that a call names."""
    for name, content in CONTENT.items():
        if name.split("/")[0] in words:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            path.write_bytes(data)
    for name, make in OTHERS.items():
        if name in words:
            make(folder / name)


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*"))
