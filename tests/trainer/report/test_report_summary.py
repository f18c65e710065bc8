"""Tests `summary.md`, a short overview of a run from all available records."""

import re

import pytest

from flotilla.trainer.report.report import to_markdown

RULE = {"metric": "accuracy", "bound": "min", "threshold": 0.95, "value": 0.97, "passed": True}
FACTS = {
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
    text = text_of(FACTS, "gs://b/report.html")
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


def test_a_failure_without_a_record_is_reported_as_far_as_it_is_known():
    text = text_of({"verdict": "failed", "error": "KFP says: <quota>"})
    assert "\n- KFP says: \\<quota\\>\n" in text


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


def test_what_no_file_can_hold_is_written_all_the_same():
    assert b"\\udcff" in to_markdown({"run_id": "\udcff"}, "")


def test_it_stays_short():
    facts = {"metrics": {f"m{i}": i for i in range(100)}, "rules": [RULE] * 100}
    refused = {"verdict": "refused", "reasons": ["x"] * 100}
    assert len(text_of({**facts, **refused}).splitlines()) < 60
