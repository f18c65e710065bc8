"""Tests the page of a run, rendered from all available records and opened in a browser."""

import math
import re
import struct
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.schema import Config
from flotilla.trainer.report import report
from flotilla.trainer.report.report import environment, to_markdown
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.browser import browser, found
from tests.trainer.page import Page
from tests.trainer.report.test_views import CHAMPION, evaluation_of, pictures_of

EVIL = """<script>alert(1)</script>"'&<img src=x onerror=alert(1)>{{ 7 * 7 }}"""

FACTS: dict[str, Any] = {
    "run_id": "digits-20260102-ab12",
    "verdict": "refused",
    "config": Config().model_dump(mode="json"),
    "steps": [
        {"step": "prepare_data", "status": "done", "seconds": 2.5, "uri": "file:///r/datasets/k",
         "metrics": {"examples": 1797, "reused": False}, "error": ""},
        {"step": "train_model", "status": "done", "seconds": 12.25, "uri": "file:///r/c/step-1",
         "metrics": {"global_step": 1500, "loss": 0.0123456789}, "error": ""},
    ],
    "metrics": {"accuracy": 0.9722222222, "loss": 0.11},
    "rules": [
        {"metric": "accuracy", "bound": "min", "threshold": 0.999, "value": 0.972, "passed": False},
        {"metric": "loss", "bound": "max", "threshold": 0.5, "value": 0.11, "passed": True},
        {"metric": "auc", "bound": "min", "threshold": 0.5, "value": None, "passed": False},
    ],
    "history": [
        {"global_step": 500, "loss": 1.5, "steps_per_second": 400.0},
        {"global_step": 1000, "loss": 0.5, "steps_per_second": 450.0, "validation_loss": 0.6,
         "validation_accuracy": 0.9},
    ],
    "incidents": [{"event": "restart", "time": 1767225600.0, "task": "worker 1", "exit_code": -9}],
}  # fmt: skip


def test_a_whole_run(tmp_path):
    path = tmp_path / "a new folder" / "repört.html"
    report.write(FACTS, path)
    page = Page(path.read_text(encoding="utf-8"))
    assert page.heads() == [
        "Test metrics", "Rules of the gate", "Training", "Incidents", "Steps and lineage",
        "Configuration",
    ]  # fmt: skip
    for words in [
        "digits-20260102-ab12", "Accuracy", "0.9722", "at least", "at most", "0.999",
        "examples 1797, reused no", "global_step 1500, loss 0.01235", "file:///r/datasets/k",
        "2026-01-01 00:00:00 UTC", "task worker 1, exit_code -9", "12 s",
    ]:  # fmt: skip
        assert words in page.text
    assert "strategy: async_parameter_server" in page.text


def test_the_verdict_comes_first_with_its_reasons():
    page = Page(report.render(FACTS))
    assert page.words[:6] == [
        "digits-20260102-ab12: refused",
        "Refused: accuracy is below 0.999, and 1 more",
        "digits: refused: accuracy is below 0.999, and 1 more",
        "Accuracy is 0.972; it must be at least 0.999 (gate.min).",
        "AUC is not a finite number; it must be at least 0.5 (gate.min).",
        "What to do next",
    ]


def test_the_head_says_it_in_one_sentence_with_notes():
    evaluation = {
        "main_metric": "auc", "metrics": {"loss": 0.3, "auc": 0.91},
        "directions": {"auc": "higher"}, "intervals": {"auc": [0.88, 0.94]},
        "positive": "churned", "examples": 900,
        "threshold": {"value": 0.31, "chosen_on": "validation", "examples": 1000},
        "constant": {"answer": "always 0.03", "metrics": {"auc": 0.5, "loss": 0.4}},
        "baselines": [
            {"name": "linear", "made_by": "scikit-learn", "rows": 20, "of_rows": 80, "seconds": 2.0,
             "metrics": {"auc": 0.95, "loss": 0.25}},
            {"name": "popularity", "skipped": EVIL},
        ],
        "champion": {**CHAMPION, "metrics": {"auc": 0.9}, "own": {
            "date": "2026-03-03", "examples": 57, "metrics": {"auc": 0.93}}, "classes": [
            {"label": EVIL, "examples": 3, "own": 0.5, "champion": None, "judged": False}]},
    }  # fmt: skip
    facts = {
        "run_id": "churn-1", "verdict": "blessed", "config": {"name": "churn"}, "notes": [EVIL],
        "registered": {"decision": "promoted", "version": 2, "promotion": 2}, "rules": [],
        "evaluation": evaluation,
        "metrics": evaluation["metrics"], "artifacts": {"data page": "file:///r/v/page.html"},
    }  # fmt: skip
    page = Page(report.render(facts))
    assert page.words[1:4] == [
        "Promoted, no bound set",
        "churn v2: AUC 0.910, +0.010 against the champion, constant 0.500; promoted, no bound set",
        EVIL,
    ]
    assert ("class", "verdict blessed noted") in page.attributes
    tile = page.words.index("AUC")
    assert page.words[tile : tile + 5] == [
        "AUC", "0.910", "+0.010 against the champion", "constant 0.500", "0.880 to 0.940",
    ]  # fmt: skip
    head = page.words.index("Metric")
    assert page.words[head : head + 12] == [
        "Metric", "Model", "Interval", "Champion", "Constant", "Linear",
        "Loss", "0.3000", "-", "0.4000", "0.2500", "AUC",
    ]  # fmt: skip
    for words in [
        "Positive class: churned, at a probability of 0.31 or more, chosen on 1000 validation "
        "examples.",
        "Constant: always 0.03.", "Linear (scikit-learn, 20 of 80 rows, 2.0 s).",
        "In its own run, the champion was evaluated on 57 test examples, 2026-03-03: AUC 0.93.",
        "too few examples", "features, findings, splits",
    ]:  # fmt: skip
        assert words in page.words
    assert "script" not in page.tags


def test_what_the_preparation_notes_is_among_the_warnings():
    steps = [{"step": "prepare_data", "metrics": {"notes": ["'a' <b> is text"]}}]
    steps.append({"step": "check_gate", "metrics": {"decision": "blessed", "notes": ["no bound"]}})
    text = Page(report.render({"steps": steps})).text
    assert "the data: 'a' <b> is text" in text
    assert "the data: no bound" not in text


def test_of_little_that_is_known_little_is_said():
    assert Page(report.render({})).text == "run: unknown\nUnknown\nrun: unknown"
    assert "run: unchanged" in report.render({"verdict": "unchanged", "steps": [{}]})
    page = Page(report.render({"history": [{"global_step": 1, "loss": math.nan}, {}]}))
    assert "svg" not in page.tags
    assert page.heads() == []


@pytest.mark.parametrize("name", FACTS)
def test_any_part_may_be_missing_or_empty(name):
    part = {
        "metrics": "Test metrics", "rules": "Rules of the gate", "history": "Training",
        "steps": "Steps and lineage", "incidents": "Incidents", "config": "Configuration",
    }.get(name)  # fmt: skip
    heads = [head for head in Page(report.render(FACTS)).heads() if head != part]
    rest = {key: value for key, value in FACTS.items() if key != name}
    for facts in (rest, {**rest, name: None}, {**rest, name: type(FACTS[name])()}):
        assert Page(report.render(facts)).heads() == heads
    if name in ("steps", "rules", "history", "incidents"):
        for verdict in ("failed", "refused"):
            Page(report.render({**FACTS, "verdict": verdict, name: [{}]}))


def test_all_is_escaped():
    facts = {
        "run_id": EVIL,
        "verdict": EVIL,
        "config": {EVIL: {"a": EVIL}},
        "steps": [{"step": EVIL, "status": EVIL, "seconds": EVIL, "metrics": {EVIL: EVIL},
                   "uri": EVIL}],
        "tries": [{"step": EVIL, "status": EVIL, "seconds": 1.0, "began": 1.0}],
        "metrics": {EVIL: EVIL},
        "rules": [{"metric": EVIL, "bound": EVIL, "threshold": EVIL, "value": EVIL}],
        "history": [{"global_step": 1, "loss": 1.0, EVIL: EVIL}],
        "incidents": [{"event": EVIL, "time": EVIL, EVIL: EVIL}],
    }  # fmt: skip
    html = report.render(facts)
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "49" not in page.text
    assert html.count("&lt;script&gt;") >= 12


def test_it_needs_no_other_file():
    html = report.render(FACTS)
    page = Page(html)
    assert not [name for name, _ in page.attributes if name in ("src", "srcset", "action")]
    assert page.links() == ["file:///r/datasets/k", "file:///r/c/step-1"]
    assert not {"link", "script", "img", "iframe", "object", "base"} & set(page.tags)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"https?://", html)


def test_it_is_made_for_light_and_dark():
    style = report.render({})
    assert "color-scheme: light dark" in style
    light, dark, paper = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert "prefers-color-scheme: dark" in style
    names = [set(re.findall(r"(--\w+):", part)) for part in (light, dark, paper)]
    assert names[0] == names[1] == names[2]
    assert set(re.findall(r"var\((--\w+)\)", style)) == names[0]


def test_the_history_is_drawn():
    page = Page(report.render(FACTS))
    assert page.tags.count("svg") == 3
    assert page.tags.count("polyline") == 4
    labels = [value for name, value in page.attributes if name == "aria-label"]
    titles = ("Loss", "Accuracy", "Global steps per second")
    assert labels == ["On this page", *(f"{title} over global steps" for title in titles)]
    assert page.tags.count("input") == 3, "one of them is shown, without a script"
    assert page.attributes.count(("checked", "")) == 1
    assert "global_step 1000, loss 0.5" in page.text
    for name, value in page.attributes:
        if name == "points":
            assert re.fullmatch(r"[\d.]+,[\d.]+( [\d.]+,[\d.]+)*", value)


def test_an_incident_at_no_time():
    for time in (math.nan, 1e300, None, "today", True):
        page = Page(report.render({"incidents": [{"event": "restart", "time": time}]}))
        assert page.words[-3] == report.format_value(time)


def test_earlier_tries_of_a_step_are_next_to_its_own_time():
    step = {"step": "train_model", "seconds": 3.5, "earlier_seconds": 40.0}
    for tries, displayed in ((1, "3.5 s"), (2, "3.5 s + 40 s in 1 earlier try")):
        assert displayed in Page(report.render({"steps": [{**step, "tries": tries}]})).words


def test_what_is_known_of_a_failure_without_a_record_is_next_to_the_verdict():
    words = Page(report.render({"verdict": "failed", "error": "KFP says: <quota>"})).words
    assert words[2:4] == ["run: failed", "KFP says: <quota>"]


def test_a_page_is_replaced_and_text_that_is_not_unicode_is_displayed_all_the_same(tmp_path):
    for facts in (FACTS, {"run_id": "bad \udcff", "config": {"a": "\udcff"}}):
        report.write(facts, tmp_path / "r.html")
    assert "bad \\udcff" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["r.html"]
    assert b"\\udcff" in to_markdown({"run_id": "\udcff"}, "")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot write .*a file where a folder is expected"):
        report.write(FACTS, tmp_path / "file" / "report.html")


def test_numbers():
    assert [report.format_value(empty) for empty in (None, "", {}, [])] == ["-"] * 4
    values = [0, 0.0, True, False, 1 / 3, math.nan, 1500000]
    texts = ["0", "0", "yes", "no", "0.333333", "nan", "1500000"]
    assert [report.format_value(value) for value in values] == texts
    assert report.format_value({"a": 0.5, "b": [1, None]}) == "a 0.5, b 1, -"
    assert report.format_value(("x", 2.0)) == "x, 2"


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=6,
)
_row = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ["step", "status", "seconds", "metrics", "uri", "error", "metric", "bound", "threshold",
         "value", "passed", "global_step", "loss", "event", "time", "began", "tries",
         "earlier_seconds"],
        _plain,
    ),
)  # fmt: skip
_facts = st.fixed_dictionaries(
    {},
    optional={
        "run_id": st.none() | st.text(),
        "verdict": st.none() | st.text() | st.sampled_from(["failed", "refused"]),
        "config": st.dictionaries(st.text(), _plain, max_size=3),
        "error": st.none() | st.text(),
        "metrics": st.dictionaries(st.text(), _plain, max_size=3),
        **{
            name: st.lists(_row, max_size=3)
            for name in ("steps", "tries", "rules", "history", "incidents")
        },
    },
)


@pytest.mark.slow
@settings(deadline=None)
@given(_facts)
def test_whatever_the_facts_the_page_is_well_formed(facts):
    page = Page(report.render(facts))
    assert page.tags[:2] == ["html", "head"]
    assert "script" not in page.tags


def test_the_page_of_a_run_with_thousands_of_events_is_small():
    incidents = [
        {"event": "restart", "task": "worker-0", "time": 1e9 + n, "last_lines": ["x" * 80]}
        for n in range(3000)
    ]
    saved = [
        {"event": "checkpoint_published", "time": 1e9 + n, "global_step": n} for n in range(3000)
    ]
    tries = [{"step": "train_model", "status": "done", "began": 1e9, "seconds": 3000.0}]
    history = [{"global_step": 1, "loss": 2.0}, {"global_step": 3000, "loss": 1.0}]
    page = report.render(
        {"incidents": incidents, "checkpoints": saved, "tries": tries, "history": history}
    )
    assert len(page) < 400_000
    assert "3000 published checkpoints (thin marks), 3000 other events" in page
    assert "The newest 200; 2800 earlier ones are in the event log of the run." in page
    assert "worker-0: restart (3000)" in page
    assert Page(page).attributes.count(("class", "flag")) < 70


WINDOWS = [(360, 740), (1280, 900)]
LONG = "x" * 300
SPACED = "a long name of a class with many words in it"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    command = found()
    if command is None:
        pytest.skip("no Chromium on this machine: the report was not looked at in a browser")
    with browser(command, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def evaluated(folder, names):
    """Return the facts of an evaluation with worst examples and a champion."""
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


def of_digits(folder):
    """Return the facts of a typical blessed run with ten classes."""
    steps = [{**step, "began": 100.0 + at} for at, step in enumerate(FACTS["steps"])]
    return {
        **FACTS, **evaluated(folder, [str(digit) for digit in range(10)]), "verdict": "blessed",
        "steps": steps, "tries": steps,
        "checkpoints": [{"event": "checkpoint_published", "time": 99.0}],
        "registered": {"decision": "promoted", "version": 12, "promotion": 14, "rules": []},
        "lineage": {"commit": "a" * 40, "dataset": f"s3://bucket/{LONG}", "image": ""},
        "cost": {"tasks": {"chief": 1, "ps": 2, "worker": 4}, "task_hours": 0.25},
    }  # fmt: skip


def of_odd_names(folder):
    """Return the facts of a refused run with unusual names and texts."""
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


def of_many_classes(folder):
    """Return the facts of a run with more classes than a table can show."""
    return {**FACTS, **evaluated(folder, [f"class number {n}" for n in range(150)])}


def of_nothing(_folder):
    return {}


@pytest.fixture(scope="module", params=[of_digits, of_odd_names, of_many_classes, of_nothing])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.__name__)
    path = folder / "report.html"
    report.write(request.param(folder), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_it_fits_and_asks_for_nothing(chromium, page, width, height, scheme):
    seen = chromium.look(page, width=width, height=height, scheme=scheme)
    assert seen.complaints == []
    assert seen.requests == []
    assert seen.outside == []
    assert (seen.width, seen.inner) == (width, width)
    if page.parent.name.startswith("of_digits"):
        assert seen.scrolling == [], "nothing of a usual run has to be scrolled sideways"
    # In a PNG file, the width is stored at bytes 16 to 19.
    assert struct.unpack(">I", seen.picture[16:20]) == (width,)
    lightness = [sum(map(int, tone[4:-1].split(","))) / 3 for tone in seen.tones]
    ground, ink = lightness if scheme == "light" else reversed(lightness)
    assert ground > 220
    assert ink < 50


@pytest.mark.slow
def test_many_classes_make_no_large_page(tmp_path):
    facts = of_many_classes(tmp_path)
    pictures = sum(map(len, facts["pictures"].values()))
    assert len(report.render(facts)) - pictures < 100_000


@pytest.mark.slow
def test_every_worst_example_is_a_picture_that_can_be_displayed(chromium, tmp_path):
    report.write(of_digits(tmp_path), tmp_path / "report.html")
    chromium.look(tmp_path / "report.html", width=1280, height=900, scheme="light")
    sizes = chromium.evaluate("[...document.images].map(each => each.naturalWidth)")
    assert sizes == [5] * 25


@pytest.mark.slow
def test_one_chart_is_displayed_and_another_by_choice(chromium, tmp_path):
    report.write(FACTS, tmp_path / "report.html")
    chromium.look(tmp_path / "report.html", width=1280, height=900, scheme="light")
    displayed = "[...document.querySelectorAll('.chart')].filter(e => e.clientHeight)"
    title = f"{displayed}.map(e => e.querySelector('figcaption').innerText.split(' ')[0])"
    assert chromium.evaluate(title) == ["Loss"]
    chromium.evaluate("document.querySelectorAll('.choice label')[1].click()")
    assert chromium.evaluate(title) == ["Accuracy"]


@pytest.mark.slow
def test_a_page_that_is_wrong_is_noticed(chromium, tmp_path):
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


def test_the_page_says_which_checkpoint_was_evaluated_and_why():
    why = "best by validation loss, because validations do not measure NDCG"
    metrics = {"global_step": 9, "handed_on_step": 4, "handed_on_as": why}
    history = [{"global_step": n, "loss": 1 / n, "validation_loss": n} for n in (4, 9)]
    steps = [{"step": "train_model", "status": "done", "metrics": metrics}]
    html = report.render({"steps": steps, "history": history})
    assert f"Evaluated: global step 4 of 9, {why}." in html


def test_a_template_of_another_room_has_the_style_the_words_and_the_escaping(tmp_path):
    source = (
        '<style>{% include "style.css.j2" %}</style>{{ name | titled }} {{ 0.97777 | rounded }}'
    )
    (tmp_path / "mine.html.j2").write_text(source, encoding="utf-8")
    html = environment(tmp_path).get_template("mine.html.j2").render(name="<b>_auc")
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert html.endswith("</style>&lt;b&gt; AUC 0.9778")


def test_a_name_that_is_not_known_is_an_error(tmp_path):
    (tmp_path / "mine.html.j2").write_text("{{ absent }}", encoding="utf-8")
    with pytest.raises(jinja2.UndefinedError, match="absent"):
        environment(tmp_path).get_template("mine.html.j2").render()


def test_text_that_turns_the_direction_of_what_follows_is_made_harmless():
    page = environment().from_string("{{ name }} is 0.4").render(name="a\u202eb\u2066<i>")
    assert page == "a\\u202eb\\u2066&lt;i&gt; is 0.4"


RULE = {"metric": "accuracy", "bound": "min", "threshold": 0.95, "value": 0.97, "passed": True}
SUMMARIZED = {
    "run_id": "digits-1",
    "verdict": "blessed",
    "metrics": {"accuracy": 0.971234567, "loss": 0.1},
    "rules": [RULE],
    "steps": [{"step": "train_model", "status": "done", "seconds": 12.5, "error": ""}],
    "lineage": {"image": "our/image:2", "commit": "", "checkpoint": "gs://b/c"},
}


def text_of(facts, report=""):
    return to_markdown(facts, report).decode()


def rows_of(text):
    """Return the cells of every table row, without the separator lines."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_blessed_run():
    text = text_of(SUMMARIZED, "gs://b/report.html")
    assert text.startswith("# digits-1: blessed\n\n**digits-1: blessed**\n")
    assert text.endswith("\n\nFull report: `gs://b/report.html`\n")
    rows = rows_of(text)
    assert ["Accuracy", "0.9712"] in rows
    asked = "Accuracy is 0.97; it must be at least 0.95 \\(gate.min\\)."
    assert [asked, "passed"] in rows
    assert ["train\\_model", "done", "12 s"] in rows
    assert [row[0] for row in rows if row[0] in {"image", "commit", "checkpoint"}] == [
        "image", "checkpoint",
    ]  # fmt: skip


def test_a_broken_rule_and_a_refusal_of_the_registry_are_named():
    registered = {"decision": "refused", "reasons": ["megabytes 9 is above 1"], "rules": []}
    broken = {**RULE, "passed": False, "bound": "max", "value": 0.9}
    text = text_of({"verdict": "refused", "rules": [RULE], "registered": registered})
    assert "**run: refused**" in text
    assert "- megabytes 9 is above 1" in text
    text = text_of({"verdict": "refused", "rules": [broken]})
    assert "- Accuracy is 0.9; it must be at most 0.95 \\(gate.max\\)." in text
    assert rows_of(text)[-1][1] == "failed"


def test_a_step_that_failed_is_named_first():
    steps = [{"step": "train_model", "status": "failed", "seconds": 1, "error": "worker-0 died"}]
    text = text_of({"run_id": "r", "verdict": "failed", "steps": steps})
    assert "\n- train\\_model: worker-0 died\n" in text


def test_the_time_of_earlier_tries_and_the_cost_are_reported():
    step = {"step": "train_model", "status": "done", "seconds": 12.5, "error": ""}
    again = {**step, "tries": 3, "earlier_seconds": 40.25}
    once = {**step, "step": "check_gate", "tries": 1, "earlier_seconds": 0.0}
    cost = {"tasks": {"ps": 1, "worker": 2}, "task_hours": 0.5}
    rows = rows_of(text_of({"steps": [again, once], "cost": cost}))
    assert ["train\\_model", "done", "12 s \\+ 40 s in 2 earlier tries"] in rows
    assert ["check\\_gate", "done", "12 s"] in rows
    assert ["tasks", "ps 1, worker 2"] in rows
    assert ["task hours", "0.5"] in rows


@pytest.mark.parametrize("facts", [{}, {"verdict": "odd"}, {"metrics": {}, "steps": []}])
def test_of_a_run_that_left_nothing(facts):
    text = text_of(facts)
    assert text.startswith("# run: ")
    assert not rows_of(text)


@pytest.mark.parametrize(
    "word",
    ["<script>alert(1)</script>", "a | b", "[x](http://evil)", "`rm`", "# head\n# head", "$x$"],
)
def test_text_of_others_is_displayed_unchanged(word):
    error = {"step": "s", "status": "failed", "seconds": 1, "error": word}
    text = text_of({"run_id": word, "metrics": {word: word}, "steps": [error]}, word)
    plain, _, code = text.rpartition("Full report: ")
    assert not re.search(r"(?<!\\)[<>\[\]`$]", plain)
    assert {len(row) for row in rows_of(plain)} == {2, 3}
    assert len(re.findall(r"^#", plain, re.MULTILINE)) == 1
    assert re.fullmatch(r"`[^`\n]*`\n", code)


def test_it_stays_short():
    facts = {"metrics": {f"m{i}": i for i in range(100)}, "rules": [RULE] * 100}
    refused = {"verdict": "refused", "reasons": ["x"] * 100}
    assert len(text_of({**facts, **refused}).splitlines()) < 60
