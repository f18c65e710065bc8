"""A preparation that is killed again and again ends with the same bytes as one that is not."""

import itertools
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer import storage

FILES, ROWS, KILLS = 12, 400, 2


@pytest.fixture
def tables(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    for number in range(FILES):
        drawn = np.random.RandomState(number)
        columns = {name: drawn.normal(size=ROWS).astype(np.float32) for name in "abcdef"}
        table = pa.table({**columns, "label": drawn.randint(0, 3, ROWS)})
        pq.write_table(table, folder / f"{number:02d}.parquet", compression="none")
    return folder


def begun(tables, root):
    words = [sys.executable, "-m", "tests.trainer.data.preparation.killed", str(tables), str(root)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.long
def test_kills_at_random_change_nothing(tables, tmp_path):
    draw = random.Random(5)
    for _ in range(KILLS):
        with begun(tables, tmp_path / "killed") as process:
            # So many parts are done; the next ones are on their way.
            list(itertools.islice(process.stdout, draw.randint(1, FILES // KILLS - 1)))
            process.kill()
    (kept,) = (tmp_path / "killed" / "preparing").iterdir()
    assert list(kept.glob("*/MANIFEST.json"))
    lines = {}
    for name in ("killed", "alone"):
        with begun(tables, tmp_path / name) as process:
            lines[name] = [line for line in process.stdout if "is done" in line]
        assert process.returncode == 0
    assert len(lines["killed"]) < len(lines["alone"]) == FILES
    ours, other = (
        storage.newest(storage.uri_of(tmp_path / name / "datasets"))[1] for name in lines
    )
    assert ours.same_content(other)
    assert not list((tmp_path / "killed" / "preparing").rglob("*.records"))
