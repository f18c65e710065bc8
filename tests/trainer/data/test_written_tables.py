"""Tests that random tables in the styles of four programs are read as they were written."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.files.sources import opened

Column = tuple[str, list[Any]]
Table = dict[str, Column]
# Bytes of each file, and the keys of the `data` section that the table needs.
Written = tuple[dict[str, bytes], dict[str, Any]]

TEXTS = (
    "red", "grün", "naïve café", "東京", "a,b", 'say "hi"', "it's", '3" pipe', "tab\there",
    "two\nlines", "semi;colon", "=1+1", "100% sure", "back\\", "C:\\dir", "'single'",
    '"quoted"', "x|y", "#hash",
)  # fmt: skip
NAMES = ("x", "Größe", "unit price", "Width (cm)", "a/b", "class", "rate %", "y:z", "Total €")
START = datetime(2020, 1, 1, tzinfo=UTC)


def value(kind: str, chance: random.Random, texts: Sequence[str]) -> Any:
    match kind:
        case "int":
            return chance.randint(-1000, 10 ** chance.choice([2, 6, 9]))
        case "float":
            return round(chance.gauss(0, 100), 3)
        case "bool":
            return chance.random() < 0.5
        case "time":
            return START + timedelta(seconds=chance.randrange(10**8))
    return chance.choice(texts)


def table(chance: random.Random, texts: Sequence[str] = TEXTS) -> Table:
    count = chance.randint(40, 60)
    found: Table = {"row": ("int", list(range(count)))}
    for name in chance.sample(NAMES, 4):
        kind = chance.choice(["int", "float", "bool", "time", "text", "text"])
        gaps = chance.random() < 0.4
        found[name] = (
            kind,
            [
                None if gaps and chance.random() < 0.2 else value(kind, chance, texts)
                for _ in range(count)
            ],
        )
    return {**found, "label": ("text", [chance.choice("pq") for _ in range(count)])}


def lines(columns: Table, cell: Callable[[str, Any], str]) -> list[list[str]]:
    kinds = [kind for kind, _ in columns.values()]
    rows = zip(*(values for _, values in columns.values()), strict=True)
    return [[cell(*each) for each in zip(kinds, row, strict=True)] for row in rows]


def as_pandas(columns: Table, chance: random.Random) -> Written:
    """Write as DataFrame.to_csv does: usually with an unnamed index, and with True and False."""
    mark, delimiter = chance.choice(["", "NaN"]), chance.choice([",", ";", "\t"])

    def cell(kind: str, given: Any) -> str:
        if given is None:
            return "" if kind in ("text", "time") else mark
        return f"{given:%Y-%m-%d %H:%M:%S}" if kind == "time" else str(given)

    index = chance.random() < 0.7
    rows = lines(columns, cell)
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow([*([""] if index else []), *columns])
    writer.writerows([*([str(at)] if index else []), *row] for at, row in enumerate(rows))
    return {"a.csv": text.getvalue().encode()}, {}


def as_r(columns: Table, chance: random.Random) -> Written:
    """Write as write.csv and write.csv2 do: quoted text and row names, NA, TRUE, 15 digits."""
    comma = chance.random() < 0.3
    delimiter = ";" if comma else ","

    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    def cell(kind: str, given: Any) -> str:
        if given is None:
            return '""' if kind == "text" else "NA"
        match kind:
            case "text":
                return quoted(given)
            case "bool":
                return str(given).upper()
            case "float":
                return f"{given:.15g}".replace(".", "," if comma else ".")
            case "time":
                return f"{given:%Y-%m-%d %H:%M:%S}"
        return f"{given:.15g}"

    rows = [[quoted(""), *map(quoted, columns)]]
    rows += [[quoted(str(at)), *row] for at, row in enumerate(lines(columns, cell), 1)]
    text = "".join(delimiter.join(row) + "\n" for row in rows)
    return {"a.csv": text.encode()}, decimals(columns) if comma else {}


def as_excel(columns: Table, chance: random.Random) -> Written:
    """Write as Excel's CSV UTF-8: a BOM, CRLF, `sep=`, trailing empty rows, formula errors."""
    comma = chance.random() < 0.4
    delimiter = ";" if comma else ","

    def cell(kind: str, given: Any) -> str:
        if given is None:
            return chance.choice(["", "#N/A", "#DIV/0!"]) if kind in ("int", "float") else ""
        match kind:
            case "bool":
                return str(given).upper()
            case "float":
                return str(given).replace(".", "," if comma else ".")
            case "time":
                return f"{given:%Y-%m-%d %H:%M:%S}"
        return str(given)

    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\r\n")
    writer.writerows([list(columns), *lines(columns, cell)])
    before = f"sep={delimiter}\r\n" if chance.random() < 0.3 else ""
    after = (delimiter * (len(columns) - 1) + "\r\n") * chance.choice([0, 0, 2])
    written = before + text.getvalue() + after
    return {"a.csv": written.encode("utf-8-sig")}, decimals(columns) if comma else {}


def as_spark(columns: Table, chance: random.Random) -> Written:
    """Write as Spark's DataFrame.write.csv: part files, escaped quotes, times with a time zone."""

    def cell(kind: str, given: Any) -> str:
        if given is None:
            return ""
        match kind:
            case "text":
                return quoted(given)
            case "bool":
                return str(given).lower()
            case "time":
                return f"{given:%Y-%m-%dT%H:%M:%S}.000Z"
        return str(given)

    def quoted(text: str) -> str:
        if '"' in text:
            return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return f'"{text}"' if set(text) & set(",\n#") else text

    rows = lines(columns, cell)
    cut = chance.choice([len(rows), len(rows) // 2])
    files = {
        f"part-0000{part}-c000.csv": "".join(",".join(row) + "\n" for row in [list(columns), *some])
        for part, some in enumerate((rows[:cut], rows[cut:]))
    }
    return {"_SUCCESS": b"", **{name: text.encode() for name, text in files.items()}}, {}


def decimals(columns: Table) -> dict[str, Any]:
    floats = [name for name, (kind, _) in columns.items() if kind == "float"]
    return {"types": dict.fromkeys(floats, "number_comma")}


def meaning(kind: str, given: Any) -> Any:
    if kind == "text":
        return (given or "").strip().encode()
    if given is None:
        return np.nan
    return given.timestamp() if kind == "time" else float(given)


def same(expected: Sequence[Any], found: Any) -> bool:
    if found.dtype == object:
        return [each.replace(b"\r\n", b"\n") for each in found] == expected
    return np.allclose(found.astype(np.float64), expected, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("write", [as_pandas, as_r, as_excel, as_spark])
def test_values_are_those_that_were_written(write: Any, seed: int, tmp_path: Path) -> None:
    # Unquoted backslashes, as Spark writes them, are rejected.
    texts = [each for each in TEXTS if write is not as_spark or "\\" not in each]
    columns = table(random.Random(seed), texts)
    files, keys = write(columns, random.Random(seed))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    selection, found = opened(tmp_path, label="label", **keys)
    assert list(selection.specs) == list(columns)
    order = np.argsort(found["row"])
    labels = np.array(selection.specs["label"].labels)
    assert labels[found["label"][order]].tolist() == columns["label"][1]
    for name, (kind, values) in list(columns.items())[:-1]:
        assert same([meaning(kind, each) for each in values], found[name][order]), name
