"""A run with `--code` is replayed with the modules of its bundle, and not those of the folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.called import call, setting

FLOTILLA = Path(sys.executable).with_name("flotilla")
BROKEN = """
def example(row):
    width = 3
    return {"x": float(row["x"]) / (width - 3), "label": row["label"]}
"""
FIXED = BROKEN.replace("(width - 3)", "width")

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture
def run_id(tmp_path):
    """A run whose own code has failed, and was mended since."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.py").write_text(BROKEN)
    lines = ["x,label", *(f"{number},{'ab'[number % 2]}" for number in range(60))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    source = setting(
        data__source=tmp_path / "rows.csv", data__map="rows:example", data__label="label"
    )
    failed = call("prepare", tmp_path / "runs", *source, "--code", "mine", cwd=tmp_path)
    assert "(rows.py:4)" in failed.answer["message"]
    # One in the folder of the command, and the one of which the bundle was made.
    for folder in (tmp_path, tmp_path / "mine"):
        (folder / "rows.py").write_text(FIXED)
    return failed.answer["run_id"]


def test_the_traceback_is_seen_again_and_the_debugger_is_in_it(run_id, tmp_path):
    words = [FLOTILLA, "replay", run_id, "prepare_data", "--pdb", "--json"]
    ended = subprocess.run(
        words,
        cwd=tmp_path,
        input="p width + 40\nw\nq\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["status"] == "same"
    assert "ZeroDivisionError: float division by zero (rows.py:4)" in answer["comparison"]
    assert not [line for line in answer["remarks"] if "rows" in line]
    assert "(Pdb) 43" in ended.stderr
    assert '-> return {"x": float(row["x"]) / (width - 3)' in ended.stderr
    # What was read of the bundle is kept, to look at.
    assert list(Path(tmp_path, answer["folder"], "storage", "code").glob("*/rows.py"))
