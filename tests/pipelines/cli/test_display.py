"""Tests the output for people: tables, which never truncate a cell, and how a run ended."""

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console, Group
from rich.text import Text

from flotilla.pipelines.cli import display
from flotilla.pipelines.cli.display import Table, Terminal, show_result, show_verdict
from flotilla.pipelines.cli.live import _one_line, work_line
from flotilla.pipelines.runs.outcome import RunResult, judge_outcome
from flotilla.trainer import storage
from flotilla.trainer.events import WorkProgress
from flotilla.trainer.events.run_state import reduce_events
from tests.pipelines.step_events import begun, done, ended, judged, promoted

URI = "gs://bucket/" + "folder/" * 9 + "model"
ROWS = [
    {"id": "a-1", "size": "9", "mark": Text("failed", "red"), "why": "no [room] left for it"},
    {"id": "b-22", "size": "10", "mark": "", "why": ""},
]


def drawn(width, rows=ROWS, **options):
    return [line.plain for line in Table(rows=rows, **options).lines(width)]


def test_in_a_pipe_it_is_whole_with_a_sign_in_each_cell():
    console = Console(file=io.StringIO(), width=10)
    console.print(Table(rows=ROWS, spare=("mark",), right=("size",)), soft_wrap=True)
    assert console.file.getvalue().splitlines() == [
        "id    size  mark    why",
        "a-1      9  failed  no [room] left for it",
        "b-22    10  -       -",
    ]


def test_a_narrow_table_drops_wraps_or_splits_its_columns():
    for width, left in ((41, "id size mark why"), (40, "id size why"), (32, "id why")):
        assert drawn(width, spare=("mark", "size"))[0].split() == left.split()
    assert drawn(32, words=("why",)) == [
        "id    size  mark    why",
        "a-1   9     failed  no [room]",
        "                    left for it",
        "b-22  10",
    ]
    assert drawn(16) == [
        "id    size", "a-1   9", "b-22  10", "",
        "id    mark", "a-1   failed", "",
        "id    why", "a-1   no [room] left for it",
    ]  # fmt: skip


def test_long_heads_have_short_ones_where_there_is_no_room():
    rows = [{"": "accuracy", "digits-0001": "0.91", "digits-0002": "0.93"}]
    more = {"right": ("digits-0001", "digits-0002")}
    more["short"] = {"digits-0001": "run 1", "digits-0002": "run 2"}
    assert drawn(34, rows, **more) == [
        "          digits-0001  digits-0002",
        "accuracy         0.91         0.93",
    ]
    assert drawn(33, rows, **more) == [
        "run 1  digits-0001", "run 2  digits-0002", "",
        "          run 1  run 2",
        "accuracy   0.91   0.93",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [None, 1, 5, 20, 60, 80, 140])
def test_a_uri_is_whole_at_every_width(width):
    rows = [{"name": "digits", "where": f"at {URI}", "more": "x"}]
    for words in ((), ("where",)):
        assert any(URI in line for line in drawn(width, rows, words=words))


def test_wide_signs_take_two_places_and_no_rows_none():
    rows = [{"a": "漢字", "b": "x"}, {"a": "abcd", "b": "y\n\x1b[1m"}]
    assert drawn(80, rows) == ["a     b", "漢字  x", "abcd  y \\u001b[1m"]
    assert drawn(80, []) == drawn(None, []) == []


def printed(show, *arguments, **settings):
    """Return what a function shows on a terminal whose output is kept."""
    console = Terminal()
    console.file = io.StringIO()
    for name, value in settings.items():
        setattr(console, name, value)
    show(console, *arguments)
    return console.file.getvalue()


def ended_with(*events):
    return judge_outcome(reduce_events(events), 0, interrupted=False)


def table_of(events):
    return printed(show_result, ended_with(*events))


def test_the_table_has_a_row_for_every_stage_of_a_step():
    events = [*done("prepare_data"), begun("train_model"), ended("train_model", "failed", 1)]
    lines = [line.split() for line in table_of(events).splitlines()]
    assert lines == [
        ["step", "stage", "status", "duration", "metrics"],
        ["prepare_data", "prepare_data", "done", "1.5", "s", "-"],
        ["train_model", "train_model", "failed", "1.5", "s", "-"],
    ]
    events = [*done("resolve_config"), *done("prepare_data"), *done("train_model"), *done("odd")]
    table = display.closing_table(ended_with(*events))
    assert [line.plain.split()[:2] for line in table.lines(80)[1:]] == [
        ["prepare_data", "resolve_config"], ["prepare_data", "done"],
        ["train_model", "train_model"], ["odd", "odd"],
    ]  # fmt: skip
    assert [line.plain.split()[0] for line in table.lines(None)[1:3]] == ["prepare_data"] * 2


def test_the_table_shows_four_metrics_or_the_progress_and_no_lists():
    metrics = {"decision": "refused", "reasons": ["a", "b"], "accuracy": 0.123456, "n": 1437}
    metrics |= {"reused": True, "more": 1}
    text = table_of([begun("check_gate"), ended("check_gate", metrics=metrics)])
    assert "decision=refused accuracy=0.1235 n=1437 reused=yes" in text
    assert "reasons" not in text
    assert "more" not in text
    metrics = {"progress": "reading: 32 %  17 s left", "share": 0.3203, "seconds_left": 17.3}
    text = table_of([begun("prepare_data"), ended("prepare_data", metrics=metrics)])
    assert text.splitlines()[1].endswith("progress=reading: 32 %  17 s left")


def test_the_report_is_the_last_line_of_all_and_no_other_and_no_uri_is_cut():
    result = ended_with(*judged("refused"), *done("finish", uri="gs://b/r/report.html"))
    assert result.artifacts["report"]
    assert "report.html" not in table_of(done("finish", uri="gs://b/r/report.html"))
    assert printed(show_verdict, result).splitlines()[-1] == "gs://b/r/report.html"
    uri = "gs://bucket/" + "a-long-folder/" * 12 + "report.html"
    lines = table_of([*judged("blessed"), *done("export_model", uri=uri)]).splitlines()
    assert lines[-2:] == ["", f"export_model  {uri}"]


def where(uri):
    _head, _row, *below = table_of(done("export_model", uri=uri)).splitlines()
    return "".join(below).removeprefix("export_model").strip()


def test_a_path_is_relative_only_below_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "ä [red] b" / "report.html"
    assert where(storage.uri_of(path)) == "runs/ä [red] b/report.html"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert where("file:///elsewhere/runs/x%20y") == "/elsewhere/runs/x y"
    # A path that only shares a prefix with the folder is not inside it.
    assert where(storage.uri_of(tmp_path / "here-too")) == f"{tmp_path}/here-too"
    assert where("gs://bucket/runs/model") == "gs://bucket/runs/model"
    assert where("") == ""


def coloured(result):
    console = Console(
        file=io.StringIO(), width=200, highlight=False, color_system="standard",
        force_terminal=True, no_color=False,
    )  # fmt: skip
    for line in display.verdict_lines(result):
        console.print(line)
    return console.file.getvalue().splitlines()


def of_model(word, notes=()):
    measured = {"metric": "accuracy", "value": 0.97777, "interval": [0.957, 0.989]}
    judged = {"decision": word, "measured": measured, "notes": list(notes),
              "headline": f"digits: accuracy 0.978; {word}",
              "reasons": ["Accuracy\n\x1b[1m is 0.978."]}  # fmt: skip
    return [
        *done("evaluate_model", metrics={"loss": 0.1, "accuracy": 0.97777}),
        *done("check_gate", metrics=judged),
    ]


def test_a_verdict_is_green_amber_or_red_with_its_reasons():
    bound, promoted_as = ["No bound is set."], {"headline": "digits v1: accuracy 0.978; promoted"}
    for notes, colour in (((), "32"), (bound, "33")):
        made = promoted(**promoted_as)
        lines = coloured(ended_with(*of_model("blessed", notes), *made, *done("finish")))
        assert lines[0] == f"\x1b[{colour}mdigits v1: accuracy 0.978; promoted\x1b[0m"
        assert lines[1:] == [f"\x1b[33mnote: {each}\x1b[0m" for each in notes]
    lines = coloured(ended_with(*of_model("refused"), *done("finish")))
    assert lines == [
        "\x1b[31mdigits: accuracy 0.978; refused\x1b[0m",
        "\x1b[31m-\x1b[0m Accuracy \\u001b[1m is 0.978.",
    ]


def test_a_run_without_a_verdict_says_where_it_ended():
    failed = [begun("train_model"), ended("train_model", "failed", 1)]
    [line] = coloured(replace(ended_with(*failed), run_id="churn-20261101-101010-abcd"))
    assert line == "\x1b[31mchurn: failed in train_model\x1b[0m"
    refused = done("validate_data", metrics={"decision": "refused", "reasons": ["too few rows"]})
    lines = coloured(replace(ended_with(*refused), run_id="mine"))
    assert [line.split("m", 1)[1] for line in lines] == [
        "mine: refused by validate_data\x1b[0m", "-\x1b[0m too few rows",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), None, "x", True, 1e-12, 1e12])
def test_records_of_an_earlier_version_say_what_they_can(value):
    events = done("evaluate_model", metrics={"accuracy": value})
    [line] = display.verdict_lines(ended_with(*events, *done("finish")))
    said = {1e-12: "1.000e-12", 1e12: "1.000e+12"}.get(value, "undefined")
    assert f"run: accuracy {said}; done" in line


def runs_of(*runs, width=80):
    return [line.plain.split() for line in display.runs_table(runs).lines(width)]


def run_of(events, run_id="digits-20261123-214000-0dea"):
    return replace(ended_with(*events), run_id=run_id)


def evaluated(**metrics):
    """Return the result of a run that took 90 seconds."""
    events = done("evaluate_model", time=1_795_470_091.0, metrics=metrics)
    return run_of([*done("prepare_data", time=1_795_470_002.0), *events])


def test_runs_with_date_duration_metric_and_verdict():
    run = evaluated(loss=0.2, accuracy=0.9778)
    assert " ".join(runs_of(run)[1]) == f"{run.run_id} done 1 min 30 s accuracy 0.9778"
    failed = run_of([ended("train_model", "interrupted", 130)])
    assert [line[0] for line in runs_of(run, failed)] == ["run", run.run_id, failed.run_id]
    wide = runs_of(run, width=120)
    assert wide[0][:3] == ["run", "verdict", "model"]
    assert wide[1][1:5] == ["done", "digits", "2026-11-23", "21:40"]
    empty = RunResult(run_id="odd name", status="unknown", exit_code=1, message="", steps=())
    for width in (80, 120):
        assert runs_of(empty, width=width)[1] == ["odd", "name", "unknown"]


@pytest.mark.parametrize(
    ("width", "end"),
    [
        (50, ["weighted", "macro", "precision of", "parts 0.9778"]),
        (60, ["weighted macro", "precision of parts", "0.9778"]),
        (80, ["weighted macro precision of parts 0.9778"]),
        (None, ["weighted macro precision of parts 0.9778 -"]),
    ],
)
def test_a_long_metric_goes_on_in_further_lines(width, end):
    run = evaluated(weighted_macro_precision_of_parts=0.97777)
    _, first, *more = runs_of(run, width=width)
    assert [" ".join(line) for line in (first[2 if width else 9 :], *more)] == end


HOSTILE = "a\nflotilla: blessed [/] [red]b[/red]\x1b[2J\x9b1A\u202ec\r\nd\\"


class TestTerminal:
    @pytest.mark.parametrize(
        "made",
        [
            lambda text: text,
            lambda text: Text.assemble(("status ", "red"), text, (" end", "bold")),
            lambda text: Table(rows=[{"name": text, text: display.mark(text)}], words=("name",)),
            lambda text: Group(_one_line(Text(text)), work_line(WorkProgress(what=text), 60)),
        ],
        ids=["text", "coloured", "table", "live"],
    )
    def test_no_text_is_a_command_has_markup_or_begins_a_line(self, made):
        text = printed(Terminal.print, made(HOSTILE), width=400)
        assert all(line.isprintable() for line in text.splitlines())
        assert not [line for line in text.splitlines() if line.startswith("flotilla:")]
        assert "flotilla: blessed [/] [red]b[/red]\\" in text

    def test_colours_stay_at_their_words_and_a_name_with_colons_is_no_emoji(self, capsys):
        line = display.escape_controls(Text.assemble("\x1b\n", ("refused", "red"), " x"))
        [span] = line.spans
        assert line.plain[span.start : span.end] == "refused"
        Terminal(stderr=True).print("model mymod:boom: x")
        assert capsys.readouterr().err == "model mymod:boom: x\n"

    @pytest.mark.parametrize(("closed", "lines"), [("stdout", 3), ("stderr", 3), ("stdout", 0)])
    def test_what_is_run_goes_on_when_nobody_reads_any_more(self, closed, lines):
        reader, writer = os.pipe()
        os.close(reader)
        code = (
            "from flotilla.pipelines.cli.display import Terminal\n"
            "from flotilla.pipelines.cli.exit import Answer, finish\n"
            f"terminal = Terminal(stderr={closed == 'stderr'})\n"
            f"for _ in range({lines}): terminal.print('x')\n"
            "finish(Answer(), as_json=True)\n"
            "raise SystemExit(3)\n"
        )
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: writer}
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, **streams, check=False, timeout=300)
        os.close(writer)
        assert ended.returncode == 3
        assert closed == "stderr" or ended.stderr == b""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_sentences_of_the_verdict_go_on_between_words_on_a_terminal_alone(is_terminal):
    reason = "Accuracy is " + "0.97 " * 9 + "and /a/path/" + "x" * 60
    file = io.StringIO()
    file.isatty = lambda: is_terminal
    printed(show_verdict, ended_with(*judged("refused", reason)), file=file, width=40)
    assert " ".join(file.getvalue().split()).endswith(reason)
    assert (reason in file.getvalue()) is not is_terminal
