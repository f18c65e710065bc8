"""The report as a browser shows it: on a phone and on a screen, light and dark."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.browser import Browser, browser, found
from tests.trainer.report.test_report import EVIL, FACTS
from tests.trainer.report.test_views import CHAMPION, evaluation_of, pictures_of
from trainer.report import report

pytestmark = pytest.mark.slow
WINDOWS = [(360, 740), (1280, 900)]
LONG = "x" * 300
SPACED = "a long name of a class with many words in it"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = found()
    if command is None:
        pytest.skip("no Chromium on this machine: the report was not looked at in a browser")
    with browser(command, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def evaluated(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the facts of an evaluation with worst examples, next to a champion."""
    generator, count = np.random.default_rng(0), max(400, 4 * len(names))
    labels = generator.integers(0, len(names), count)
    logits = generator.normal(size=(count, len(names))).astype(np.float32)
    logits[np.arange(count), labels] += 2
    images = generator.integers(0, 256, (count, 9, 5, 3)).astype(np.uint8)
    evaluation, curves = evaluation_of(folder, names, (images, labels, logits))
    evaluation["champion"] = {**CHAMPION, "uri": f"file:///{LONG}"}
    return {
        "evaluation": evaluation, "metrics": evaluation["metrics"], "pictures": pictures_of(folder),
        "curves": curves,
    }  # fmt: skip


def of_digits(folder: Path) -> dict[str, Any]:
    """A blessed run with ten classes, as most are."""
    steps = [{**step, "began": 100.0 + at} for at, step in enumerate(FACTS["steps"])]
    return {
        **FACTS, **evaluated(folder, [str(digit) for digit in range(10)]), "verdict": "blessed",
        "steps": steps, "tries": steps,
        "checkpoints": [{"event": "checkpoint_published", "time": 99.0}],
        "registered": {"decision": "promoted", "version": 12, "promotion": 14, "rules": []},
        "lineage": {"commit": "a" * 40, "dataset": f"s3://bucket/{LONG}", "image": ""},
        "cost": {"tasks": {"chief": 1, "ps": 2, "worker": 4}, "task_hours": 0.25},
    }  # fmt: skip


def of_odd_names(folder: Path) -> dict[str, Any]:
    """A refused run, with names and texts as awkward as they get."""
    names = [EVIL, LONG, SPACED, "", "日本語のとても長いクラス名" * 4, "a\nb", "é", "</style>"]
    long = {"metric": LONG, "bound": "min", "threshold": 0.1, "value": 0.0, "passed": False}
    incident = {"event": LONG, "time": 5.0, "task": LONG, "last_lines": [LONG, "<script>"] * 5}
    step = {"step": LONG, "status": "failed", "seconds": 1.5, "began": 1.5, "error": LONG}
    return {
        **FACTS, **evaluated(folder, names), "run_id": LONG,
        "rules": [{**long, "key": LONG, "note": LONG}, {**long, "metric": EVIL}],
        "incidents": [incident],
        "steps": [step], "tries": [step],
    }  # fmt: skip


def of_many_classes(folder: Path) -> dict[str, Any]:
    """More classes than a table can show."""
    return {**FACTS, **evaluated(folder, [f"class number {n}" for n in range(150)])}


def of_nothing(_folder: Path) -> dict[str, Any]:
    """A run that left nothing."""
    return {}


@pytest.fixture(scope="module", params=[of_digits, of_odd_names, of_many_classes, of_nothing])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    report.write(request.param(folder), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_it_fits_and_asks_for_nothing(
    chromium: Browser, page: Path, width: int, height: int, scheme: str
) -> None:
    seen = chromium.look(page, width=width, height=height, scheme=scheme)
    assert seen.complaints == []
    assert seen.requests == []
    assert seen.outside == []
    assert (seen.width, seen.inner) == (width, width)
    # The size of a PNG stands behind its signature and the name of its first chunk.
    assert struct.unpack(">I", seen.picture[16:20]) == (width,)
    lightness = [sum(map(int, tone[4:-1].split(","))) / 3 for tone in seen.tones]
    ground, ink = lightness if scheme == "light" else reversed(lightness)
    assert ground > 220
    assert ink < 50


@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_nothing_of_a_usual_run_has_to_be_scrolled_sideways(
    chromium: Browser, tmp_path: Path, width: int, height: int
) -> None:
    report.write(of_digits(tmp_path), tmp_path / "report.html")
    seen = chromium.look(tmp_path / "report.html", width=width, height=height, scheme="light")
    assert seen.scrolling == []


def test_many_classes_make_no_large_page(tmp_path: Path) -> None:
    facts = of_many_classes(tmp_path)
    pictures = sum(map(len, facts["pictures"].values()))
    assert len(report.render(facts)) - pictures < 100_000


def test_every_worst_example_is_a_picture_that_can_be_displayed(
    chromium: Browser, tmp_path: Path
) -> None:
    report.write(of_digits(tmp_path), tmp_path / "report.html")
    chromium.look(tmp_path / "report.html", width=1280, height=900, scheme="light")
    sizes = chromium.evaluate("[...document.images].map(each => each.naturalWidth)")
    assert sizes == [5] * 25


def test_a_page_that_is_wrong_is_noticed(chromium: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<meta name="viewport" content="width=device-width">'
        '<p style="width: 2000px">wide</p><img src="elsewhere.png">'
        '<div class="table" style="overflow: auto"><p style="width: 3000px">long</p></div>'
        '<script>console.error("oh"); throw new Error("no")</script>'
    )
    seen = chromium.look(bad, width=360, height=740, scheme="light")
    assert [each for each in seen.outside if "wide" in each]
    assert seen.scrolling == ["long"]
    assert seen.requests == [(tmp_path / "elsewhere.png").as_uri()]
    assert any("oh" in each for each in seen.complaints)
    assert any("Error: no" in each for each in seen.complaints)
