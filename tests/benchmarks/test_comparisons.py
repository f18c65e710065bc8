"""Comparisons: which bound they have, whether they hold, and what is written of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import __main__ as bench
from benchmarks import comparisons, on_gpu
from benchmarks.baselines import mnist
from benchmarks.comparisons import Comparison, alternating
from trainer.errors import RunInterruptedError, UserError

MOST = Comparison(name="a", rounds=(1.0, 3.0, 2.0), at_most=2.0)
LEAST = Comparison(name="b", rounds=(1.0, 3.0, 2.0), at_least=2.5, more={"seconds": [1, 2]})


def test_a_comparison_holds_when_the_median_of_its_rounds_does():
    good = Comparison(name="x", rounds=(0.5, 2.0, 3.0), at_least=2.0).tree()
    assert (good["ratio"], good["holds"]) == (2.0, True)
    assert not Comparison(name="x", rounds=(1.9, 1.0, 3.0), at_least=2.0).tree()["holds"]


@pytest.mark.parametrize(
    ("rounds", "at_most", "holds"),
    [((1.0, 3.0, 2.0), 2.0, True), ((1.0, 3.0, 2.01), 2.0, False), ((float("nan"),), 2.0, False)],
)
def test_a_bound_from_above(rounds, at_most, holds):
    tree = Comparison(name="x", rounds=rounds, at_most=at_most).tree()
    assert tree["holds"] is holds
    assert tree["at_most"] == at_most
    assert "at_least" not in tree


@pytest.mark.parametrize("bounds", [{}, {"at_least": 1.0, "at_most": 2.0}])
def test_a_comparison_has_one_bound(bounds):
    with pytest.raises(ValueError, match="at_least or at_most"):
        Comparison(name="x", rounds=(1.0,), **bounds)


@pytest.mark.parametrize(
    ("rounds", "holds"),
    [((2.0, 1.5, 3.0), True), ((2.0, 1.4, 3.0), False), ((1.9, 1.5, 1.9), False),
     ((2.0, 3.0, float("nan")), False)],
)  # fmt: skip
def test_the_worst_round_may_have_a_bound_of_its_own(rounds, holds):
    found = Comparison(name="x", rounds=rounds, at_least=2.0, worst_at_least=1.5)
    assert found.tree()["holds"] is holds
    assert found.tree()["worst_at_least"] == 1.5
    assert "at least 2, worst at least 1.5" in comparisons.table([found])


def test_a_worst_round_is_worst_against_a_bound_from_below():
    with pytest.raises(ValueError, match="worst_at_least needs at_least"):
        Comparison(name="x", rounds=(1.0,), at_most=1.0, worst_at_least=0.5)


def test_a_comparison_has_rounds():
    with pytest.raises(ValueError, match="no rounds"):
        Comparison(name="x", rounds=(), at_most=1.0)


def test_what_is_written_is_what_was_measured(tmp_path):
    comparisons.write([MOST, LEAST], tmp_path / "build" / "bench.json")
    tree = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert tree["comparisons"] == [
        {"name": "a", "ratio": 2.0, "at_most": 2.0, "holds": True, "rounds": [1.0, 3.0, 2.0]},
        {"name": "b", "ratio": 2.0, "at_least": 2.5, "holds": False, "rounds": [1.0, 3.0, 2.0],
         "seconds": [1, 2]},
    ]  # fmt: skip
    assert tree["machine"]["cores"] >= 1


def test_the_table_says_which_way_a_bound_goes():
    lines = comparisons.table([MOST, LEAST]).splitlines()
    assert lines[1].split() == ["a", "2.000", "at", "most", "2", "true"]
    assert lines[2].split() == ["b", "2.000", "at", "least", "2.5", "false"]


def test_both_sides_take_turns_in_being_first():
    order = []

    def side(name, value):
        order.append(name)
        return value

    found = alternating(3, lambda: side("own", 1.0), lambda: side("other", 2.0))
    assert found == [(1.0, 2.0)] * 3
    assert order == ["own", "other", "other", "own", "own", "other"]


def test_single_comparisons_are_measured_by_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(tmp_path))
    for name in mnist.FILES:
        (tmp_path / name).touch()
    monkeypatch.setattr(bench, "MEASURES", {"one": lambda: MOST, "two": lambda: LEAST})
    monkeypatch.setattr(sys, "argv", ["bench", "two"])
    bench.main()
    assert [each["name"] for each in json.loads(bench.OUTPUT.read_text())["comparisons"]] == ["b"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("b ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (RunInterruptedError("interrupted at global step 7"), "interrupted"),
        (UserError("the disk is full"), "two has failed: the disk is full"),
        (subprocess.CalledProcessError(1, ["fit"]), "exit status 1"),
    ],
)
def test_what_can_be_measured_is(tmp_path, monkeypatch, capsys, error, said):
    def fail():
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mnist, "require", lambda: None)
    monkeypatch.setattr(
        bench, "MEASURES", {"one": lambda: MOST, "two": fail, "three": lambda: LEAST}
    )
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert said in str(end.value)
    measured = "a" if said == "interrupted" else "ab"
    assert "\n" not in str(end.value)
    written = json.loads(bench.OUTPUT.read_text())["comparisons"]
    assert "".join(each["name"] for each in written) == measured
    printed = capsys.readouterr().out.splitlines()[1:]
    assert "".join(line[0] for line in printed) == measured


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").touch()
    monkeypatch.setattr(mnist, "require", lambda: None)
    monkeypatch.setattr(bench, "MEASURES", {"one": lambda: pytest.fail("was measured")})
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit, match=r"^bench: cannot write build/bench.json: File exists"):
        bench.main()


def test_accuracies_are_measured_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mnist, "require", lambda: None)
    monkeypatch.setattr(bench, "MEASURES", {"one": lambda: MOST, "same-two": lambda: LEAST})
    for words, measured in [([], ["a"]), (["same-two"], ["b"]), (["same-two", "one"], ["b", "a"])]:
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        bench.main()
        written = json.loads(bench.OUTPUT.read_text())["comparisons"]
        assert [each["name"] for each in written] == measured


def test_a_gpu_that_is_asked_for_and_absent_is_said(monkeypatch):
    monkeypatch.setattr(on_gpu, "present", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", "gpu"])
    with pytest.raises(SystemExit, match="this machine has no GPU"):
        bench.main()


def test_comparisons_that_read_no_mnist_need_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(bench, "MEASURES", {"files": lambda: LEAST})
    monkeypatch.setattr(sys, "argv", ["bench", "files"])
    bench.main()
    assert bench.OUTPUT.exists()


def test_without_a_gpu_its_comparison_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mnist, "require", lambda: None)
    monkeypatch.setattr(on_gpu, "present", lambda: False)
    monkeypatch.setattr(bench, "MEASURES", {"one": lambda: MOST, "gpu": lambda: LEAST})
    monkeypatch.setattr(sys, "argv", ["bench"])
    bench.main()
    said = capsys.readouterr()
    assert "no GPU" in said.err
    assert said.out.splitlines()[-1].startswith("a ")


def test_a_comparison_that_is_none_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "memry"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert "there is no comparison 'memry'" in str(end.value)
    assert "memory" in str(end.value)


def test_official_files_that_are_missing_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["bench", "async", "memory"])
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert str(end.value).startswith(f"FLOTILLA_MNIST_DIR={tmp_path} lacks train-")
