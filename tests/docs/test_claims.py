"""A claim that is wrong is seen, and one that is right passes."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.docs.claims import missing_path, wrong_command, wrong_key
from tests.docs.markdown import page, simple_commands


def test_a_page_is_taken_apart():
    prose = "# A b\n\nSay `x y`, [z](a.md#b).\n\n"
    text = f"{prose}    one \\\n        two\n\n    three\n\n```yaml\na: 1\n```\n"
    found = page(ROOT / "a.md", text)
    assert [(block.language, block.line) for block in found.blocks] == [("", 5), ("yaml", 11)]
    assert [words for _, words in found.commands()] == [["one", "two"], ["three"]]
    assert found.inline() == ["x y"]
    assert found.links() == ["a.md#b"]
    assert found.fragments() == {"a-b"}


def test_a_line_is_taken_apart():
    line = '$ A=1 flotilla run --set "a b=c" | tee log && make x; sleep 1 # and so on'
    found = simple_commands(line)
    assert found[0] == ["flotilla", "run", "--set", "a b=c"]
    assert ["make", "x"] in found
    assert found[-1] == ["sleep", "1"]


@pytest.mark.parametrize(
    "line",
    [
        "flotilla runn",
        "flotilla run --workdirs x",
        "flotilla models shows digits",
        "flotilla run configs/none.yaml",
        "flotilla run --set training.stepz=3",
        "A=1 .venv/bin/flotilla run --set training.steps=x # note",
        "cd x && flotilla models promote digits",
        "make tset",
        "make chaos TIMES=3",
        'make run ARGS="--jsn"',
        "python -m trainer task --config a --nothing",
        "python -m pdb -m trainer task --config a",
    ],
)
def test_a_wrong_command_is_seen(line):
    document = page(ROOT / "a.md", f"Text.\n\n    {line}\n")
    assert [words for _, words in document.commands() if wrong_command(words)]


@pytest.mark.parametrize(
    "line",
    [
        "flotilla run configs/mnist.yaml --set data.manual_dir=FOLDER > log",
        "flotilla manifest | kubectl apply -f -",
        "X=1 flotilla run \\\n        --set training.steps=3",
        "flotilla models rollback digits # and again",
        "make chaos RUNS=3 SEED=1",
        'make run ARGS="configs/mnist.yaml --json"',
        "python -m trainer task --config a --dataset file:///d --checkpoints file:///c --workdir w",
        "kubectl get pods",
    ],
)
def test_a_right_command_passes(line):
    document = page(ROOT / "a.md", f"Text.\n\n    {line}\n\nMore.\n\n```sh\n{line}\n```\n")
    found = [words for _, words in document.commands()]
    assert len(found) >= 2
    assert not [words for words in found if wrong_command(words)]


def test_prose_may_name_a_command_without_its_arguments():
    assert not wrong_command(["flotilla", "compare"], whole=False)
    assert wrong_command(["flotilla", "compare"])
    assert wrong_command(["flotilla", "compare", "--nothing"], whole=False)


@pytest.mark.parametrize(
    "word", ["training.stepz", "cluster.kubernetes.pod.imag", "cluster.launcher: moon"]
)
def test_a_wrong_key_is_seen(word):
    assert wrong_key(word)


@pytest.mark.parametrize(
    "word", ["model.args.hidden_units", "cluster.kubernetes.worker.env", "cluster.launcher: tfjob"]
)
def test_a_right_key_passes(word):
    assert not wrong_key(word)


@pytest.mark.parametrize(
    ("word", "is_missing"),
    [
        ("trainer/none.py", True),
        ("trainer/config/schema.py", False),
        ("configs/mnist*.yaml", False),
    ],
)
def test_a_missing_path_is_seen(word, is_missing):
    assert missing_path(word) == is_missing
