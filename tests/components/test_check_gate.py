"""The step that judges: its word, its reasons, and another judgement under another policy."""

import json

import pytest

from tests.components.called_steps import gated
from trainer import storage

pytestmark = pytest.mark.usefixtures("emitted")


def test_a_blessing(run, root, tmp_path, emitted):
    word, uri = gated(run, root, tmp_path, 0.1)
    assert word == "blessed"
    assert json.loads(storage.read_file(uri, "decision.json"))["decision"] == "blessed"
    end = emitted()[-1]
    assert (end.uri, end.metrics["decision"]) == (uri, "blessed")


def test_a_refusal_gives_its_reasons(run, root, tmp_path, emitted):
    word, uri = gated(run, root, tmp_path, 1.0)
    assert word == "refused"
    written = json.loads(storage.read_file(uri, "decision.json"))
    assert written["reasons"] == emitted()[-1].metrics["reasons"]
    assert written["reasons"][0].endswith("is below gate.min 1.0")


def test_under_another_policy_the_same_run_is_judged_anew(run, root, tmp_path):
    refusal = gated(run, root, tmp_path, 1.0)
    blessing = gated(run, root, tmp_path, 0.1)
    assert [refusal[0], blessing[0]] == ["refused", "blessed"]
    assert gated(run, root, tmp_path, 1.0) == refusal
