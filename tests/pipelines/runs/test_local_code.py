"""`flotilla prepare --code DIR`: a run works with the modules as they were when it was started."""

from __future__ import annotations

import pytest

from tests.pipelines.called import call, calling, setting
from trainer import storage
from trainer.code import references
from trainer.events import StepEnd

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]

MODULE = """
def example(row):
    return {{"x": float(row["x"]) * {factor}, "label": row["label"]}}
"""


@pytest.fixture
def here(tmp_path):
    """A folder with rows, and a folder of modules that is not the one in which it is called."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.py").write_text(MODULE.format(factor=2))
    lines = ["x,label", *(f"{number},{'ab'[number % 2]}" for number in range(200))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    return tmp_path


def test_edits_during_a_run_do_not_change_it(here):
    source = setting(data__source=here / "rows.csv", data__map="rows:example", data__label="label")
    words = (*source, "--code", str(here / "mine"))
    with calling("prepare", here / "runs", *words, cwd=here) as process:
        # The line that names the bundle comes before the steps.
        said = [process.stderr.readline(), process.stderr.readline()]
        (here / "mine" / "rows.py").write_text(MODULE.format(factor="1 / 0"))
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "/code/" in said[1]
    uri = said[1].split()[1]
    root = storage.uri_of(here / "runs")
    assert references.referred(root) == {storage.name_of(uri)}
    failed = call("prepare", here / "runs", *words, cwd=here)
    assert failed.code == 1
    assert "ZeroDivisionError" in failed.answer["message"]
    assert "(rows.py:3)" in failed.answer["message"]
    first, *_ = failed.events(StepEnd)
    assert first.metrics["code"] != uri
