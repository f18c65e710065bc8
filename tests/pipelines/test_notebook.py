"""Tests that a notebook displays a result escaped, masked and shortened."""

from flotilla.pipelines import notebook
from flotilla.pipelines.predict import Prediction
from flotilla.pipelines.runs.outcome import RunResult, judge_outcome
from flotilla.trainer.events.run_state import RunState
from tests.pipelines.step_events import done, judged


def test_a_table_is_escaped_and_cut():
    drawn = notebook.table("<b>", ("<i>",), [["<script>alert(1)</script>"], ["s3://me:secret@b"]])
    assert "<script>" not in drawn
    assert "<b>&lt;b&gt;</b>" in drawn
    assert "secret" not in drawn
    drawn = notebook.table("", ("n",), [[number] for number in range(250)])
    assert drawn.count("<td>") == 100
    assert "and 150 more rows" in drawn
    found = Prediction(model="m", output="", rows=2, predictions=({"a": 1}, {"a": 2, "b": "x"}))
    assert repr(found) == "Prediction(m, rows=2)"
    assert "<th>a</th><th>b</th>" in found._repr_html_()


def test_a_run_is_short_in_a_prompt_and_a_table_in_a_notebook():
    state = RunState()
    evaluated = done("evaluate_model", metrics={"accuracy": 0.953125, "loss": 0.1})
    for event in [*judged("refused", "accuracy < 0.99"), *evaluated]:
        state.take(event)
    result = judge_outcome(state, 0, interrupted=False)
    assert repr(result).startswith("RunResult(refused, accuracy=0.9531)")
    drawn = result._repr_html_()
    assert "<td>status</td><td>refused</td>" in drawn
    assert "<td>why</td><td>accuracy &lt; 0.99</td>" in drawn
    failed = RunResult(run_id="d", status="failed", exit_code=1, message="train: a < b", steps=())
    assert "<td>why</td><td>train: a &lt; b</td>" in failed._repr_html_()
    assert "report" not in failed._repr_html_()
