"""Tests the heading of the page: the run, the error, the next command, the use of the model."""

import math
from typing import Any

import pytest

from flotilla.trainer.config.schema import Config
from flotilla.trainer.report import heading, report
from tests.trainer.page import Page
from tests.trainer.report.test_views import CHAMPION

TRACEBACK = """Traceback (most recent call last):
  File "/src/trainer/models/registry.py", line 67, in build
    model = function(spec, **config.args)
  File "/home/me/my_model.py", line 6, in build
    return layers(spec, "<script>")
  File "/venv/lib/python3.11/site-packages/keras/src/layers/core.py", line 9, in __init__
    raise ValueError(units)
ValueError: 0
"""
FAILED: dict[str, Any] = {
    "run_id": "digits-1", "verdict": "failed", "workdir": "/my runs",
    "config": Config().model_dump(mode="json"),
    "steps": [
        {"step": "prepare_data", "output": "dataset", "status": "done", "seconds": 1.0,
         "metrics": {"train": 1293, "test": 360, "version": "1.0.0"}},
        {"step": "train_model", "status": "failed", "error": "my_model: 0",
         "traceback": TRACEBACK},
    ],
    "tries": [{"step": "prepare_data", "began": 1795470000.0, "seconds": 63.0}],
    "history": [{"global_step": 5, "loss": 1.0}],
}  # fmt: skip
BLESSED = {
    "run_id": "digits-1", "verdict": "blessed", "workdir": "/r", "config": FAILED["config"],
    "registered": {"version": 3, "model": "file:///r/digits-1/model/step-5"},
    "artifacts": {"model": "file:///r/digits-1/model/step-5", "dataset": "gs://b/datasets/k"},
    "model": {
        "formats": ["keras"], "links": {"": "softmax"}, "saved_model": "serving/digits/5",
        "inputs": [{"feature": "image", "name": "image", "dtype": "uint8"}],
    },
}  # fmt: skip


def test_a_failed_run_begins_with_cause_place_and_next_command():
    page = Page(report.render(FAILED))
    words = page.words
    assert ("class", "verdict failed") in page.attributes
    assert words[1:12] == [
        "Failed in train_model", "digits: failed in train_model", "train_model: my_model: 0",
        "Where in your code",
        "/home/me/my_model.py:6", "in", "build", 'return layers(spec, "<script>")',
        "What to do next", "Reproduce the failure on this machine, in a debugger:",
        "flotilla replay --workdir '/my runs' digits-1 train_model --pdb",
    ]  # fmt: skip
    assert words[13] == "flotilla run --workdir '/my runs' --resume digits-1"
    assert words[14:17] == ["Training", "Time line", "Steps and lineage"], "the contents"


def test_an_error_outside_of_the_users_code_has_no_place():
    elsewhere = TRACEBACK.replace("/home/me/my_model.py", "/x/site-packages/a.py")
    for traceback in ("", "no traceback", "  File", elsewhere):
        assert heading.find_place(traceback) == {}, traceback


def test_a_run_without_a_checkpoint_is_not_resumed_and_one_elsewhere_neither():
    for name in ("history", "workdir"):
        (command,) = heading.commands({**FAILED, name: None})
        assert "replay" in command["command"]
    assert heading.commands(BLESSED) == []


def test_what_ran_is_at_the_head():
    assert dict(heading.particulars(FAILED)) == {
        "Run": "digits-1",
        "Date": "2026-11-23 21:40 UTC",
        "Duration": "1 min 03 s",
        "Model": "digits (mlp)",
        "Dataset": "digits 1.0.0: 1,293 train, 360 test",
        "Strategy": "async parameter server, 1 parameter server, 2 workers",
        "Length": "5 steps",
    }


def test_of_a_program_its_own_roles_are_said_and_no_speed_is_guessed():
    program = {"command": ["python", "own.py"], "roles": {"chief": 1, "worker": 2, "ps": 1}}
    history = [{"global_step": 5, "steps_per_second": 10.0}]
    config = {"training": {"strategy": "single", "batch_size": 8}, "program": program}
    rows = dict(heading.particulars({"config": config, "history": history}))
    assert rows["Strategy"] == "1 chief, 1 parameter server, 2 workers"
    assert "Speed" not in rows
    assert heading.examples_a_second(history, {"training": config["training"]}) == 80


def test_the_length_is_said_in_steps_and_epochs():
    history = [{"global_step": 500, "epoch": 7.9}, {"global_step": 1500, "epoch": 23.7}]
    rows = dict(heading.particulars({**FAILED, "history": history}))
    assert rows["Length"] == "1,500 steps, 24 epochs"
    page = Page(report.render({**FAILED, "history": [{**row, "loss": 1.0} for row in history]}))
    assert "An epoch is 63.3 global steps." in page.text


def test_examples_a_second_are_those_that_the_workers_counted():
    rows = [
        {"global_step": n, "steps_per_second": speed, "workers": {"w": {"examples": n * 32}}}
        for n, speed in ((10, 1.0), (20, 100.0), (30, 100.0), (5, math.nan))
    ]
    assert heading.examples_a_second(rows, {}) == 3200
    assert heading.examples_a_second([], FAILED["config"]) == 0
    plain = [{"global_step": 1, "steps_per_second": 10.0}]
    # Each worker pushes its own batches.
    assert heading.examples_a_second(plain, FAILED["config"]) == 10 * 64


def test_a_model_that_was_exported_can_be_used_and_every_artifact_is_linked():
    page = Page(report.render(BLESSED))
    assert "flotilla predict --workdir /r digits@3 FILE" in page.words
    assert 'folder = "/r/digits-1/model/step-5"' in page.text
    assert "answers = keras.ops.softmax(outputs)" in page.text
    assert page.links() == ["file:///r/digits-1/model/step-5"], "no browser opens a bucket"
    assert "gs://b/datasets/k" in page.words


def test_a_model_in_a_bucket_says_what_to_copy():
    uri = "s3://b/model"
    page = Page(report.render({"artifacts": {"model": uri}, "model": BLESSED["model"]}))
    assert f"flotilla predict {uri} FILE" in page.words
    assert f"Copy {uri} to the folder `model` first." in page.words


def test_a_link_leads_to_a_local_file_or_nowhere():
    for uri in (
        "javascript:alert(1)", "data:text/html,x", "file:///a b", 'file:///"onclick=x',
        "FILE:///a", "https://x.test", "//x.test", "", None,
    ):  # fmt: skip
        assert heading.href(uri) == ""
        html = report.render({"artifacts": {"model": uri}, "steps": [{"uri": uri}]})
        assert Page(html).links() == [], uri


def test_idle_time_is_not_counted_as_duration():
    tries = [
        {"step": "train_model", "began": 1795470000.0, "seconds": 60.0},
        {"step": "train_model", "began": 1795477200.0, "seconds": 30.0},
        # This step begins 5 s after the previous one ended; such a short gap does not count as idle
        # time.
        {"step": "evaluate_model", "began": 1795477235.0, "seconds": 5.0},
    ]
    assert dict(heading.particulars({"tries": tries}))["Duration"] == "1 min 40 s"
    page = Page(report.render({"tries": tries}))
    assert "1 min 40 s, and 1 h 59 min idle" in page.words
    assert "The run was idle for 1 h 59 min, which is left out." in page.text
    first = page.words.index("train_model, try 1")
    assert page.words[first : first + 5 : 2] == [
        "train_model, try 1", "train_model, try 2", "evaluate_model",
    ]  # fmt: skip


REFUSED = {
    "run_id": "digits-1", "verdict": "refused", "workdir": "/my runs", "config": {"name": "digits"},
    "evaluation": {"champion": CHAMPION}, "artifacts": {"data page": "file:///v/page.html"},
}  # fmt: skip
CONFIG_FILE = "'/my runs/digits-1/config.json'"
SEARCH = f"flotilla sweep --workdir '/my runs' {CONFIG_FILE} --auto --minutes 10"


@pytest.mark.parametrize(
    ("facts", "rule", "commands"),
    [
        ({}, {"key": "gate.min"}, [SEARCH, "flotilla models show --workdir '/my runs' digits"]),
        ({"evaluation": {}}, {"key": "gate.constant"}, [f"flotilla check {CONFIG_FILE}", SEARCH]),
        (
            {},
            {"metric": "comparable"},
            [f"flotilla run --workdir '/my runs' {CONFIG_FILE} --set name=digits-2"],
        ),
        ({"validation": {"decision": "refused"}, "workdir": ""}, {}, ["flotilla run CONFIG"]),
    ],
)
def test_a_refused_run_says_what_to_do_next(facts, rule, commands):
    broken = [{**rule, "passed": False}] if rule else []
    page = Page(report.render({**REFUSED, **facts, "rules": broken}))
    first = page.words.index("What to do next") + 1
    assert page.words[first + 1 : first + 2 * len(commands) : 2] == commands
    assert page.words[first + 2 * len(commands)].startswith("Look at the data")
    assert page.links()[0] == "file:///v/page.html"


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"global_step": 1, "loss": 0.5}],
        [{"global_step": 1, "loss": math.nan}, {"global_step": 2, "loss": None}],
        [{"global_step": n, "loss": 1.0, "learning_rate": 0.1} for n in range(5)],
    ],
    ids=["none", "one point", "NaN", "no validation split"],
)
def test_odd_histories(history):
    page = Page(report.render({**FAILED, "history": history, "incidents": [{"event": "restart"}]}))
    finite = [row for row in history if row["loss"] is not None and math.isfinite(row["loss"])]
    assert page.tags.count("polyline") == bool(finite)
    assert "validation" not in page.words
    if len(history) == 5:
        assert "Learning rate: 0.1 throughout." in page.text
