"""Tests the output and effects of `flotilla models`."""

import json

import pytest

from flotilla.pipelines.cli import app
from flotilla.trainer import storage
from flotilla.trainer.promotion import registry
from flotilla.trainer.tracking import addresses, promotions
from tests.pipelines.conftest import register_models
from tests.trainer.tracking import test_promotions as hub_server

METRICS = {"accuracy": 0.975}
LINEAGE = {"run_id": "digits-9", "metrics": METRICS, "commit": "abc", "fingerprint": "f00"}


@pytest.fixture
def workdir(tmp_path):
    """Create a folder of runs with three versions of `digits`; version 2 is the champion."""
    root = storage.uri_of(tmp_path / "runs")
    register_models(root, tmp_path, 3, champions=2, **LINEAGE)
    return tmp_path / "runs"


@pytest.fixture
def flotilla(workdir, capsys):
    def call(*words):
        code = app.call(["models", *words, "--workdir", str(workdir)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def answer(out):
    return json.loads(out.splitlines()[-1])


def test_list_names_the_champion(flotilla, tmp_path):
    code, out, table = flotilla("list", "--json")
    assert code == 0
    rows = answer(out)["models"]
    assert [(row["version"], row["champion"], row["global_step"]) for row in rows] == [
        (1, False, 100), (2, True, 200), (3, False, 300),
    ]  # fmt: skip
    lines = [line for line in table.splitlines() if " champion  " in line]
    assert ["0.975" in line for line in lines if "version" not in line] == [True]
    code, out, _ = flotilla("list", "--root", storage.uri_of(tmp_path / "none"))
    assert (code, out.split(" below")[0]) == (0, "no model is registered")


def test_show_reports_the_lineage_and_every_promotion(flotilla, workdir):
    code, out, text = flotilla("show", "digits", "--json")
    assert code == 0
    summary = answer(out)
    assert summary["model"]["version"] == 2
    assert summary["model"]["lineage"] == LINEAGE
    assert [each["version"] for each in summary["model"]["promotions"]] == [1, 2]
    assert storage.verify(summary["artifacts"]["model"]).fields["version"] == 2
    assert "promotion 2: version 2 by run a" in text
    assert storage.uri_of(workdir) in summary["artifacts"]["model"]
    assert answer(flotilla("show", "digits", "3", "--json")[1])["model"]["champion"] is False
    code, out, err = flotilla("promote", "digits", "9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "digits has no version 9 below" in err


def test_promote_and_roll_back(flotilla, workdir):
    root = storage.uri_of(workdir)
    code, out, _ = flotilla("promote", "digits", "3", "--json")
    assert (code, answer(out)["promotion"]) == (0, 3)
    assert registry.champion(root, "digits").number == 3
    code, out, _ = flotilla("rollback", "digits")
    assert (code, out) == (0, "digits: version 2 is champion (promotion 4)\n")
    assert flotilla("rollback", "digits")[0] == 0
    assert registry.champion(root, "digits").number == 1
    code, _, err = flotilla("rollback", "digits")
    assert (code, err) == (1, "flotilla: digits had no champion before version 1\n")


def test_a_promotion_by_a_person_is_announced_to_the_model_registry(flotilla, monkeypatch):
    monkeypatch.delenv(addresses.URI, raising=False)
    monkeypatch.delenv(promotions.TOKEN_FILE, raising=False)
    with hub_server.serving() as (address, store):
        monkeypatch.setenv(addresses.HUB, address)
        assert flotilla("promote", "digits", "3")[0] == 0
        assert flotilla("rollback", "digits")[0] == 0
    found = [each["name"] for each in store.kinds["model_versions"].values()]
    assert found == ["3", "2"]
    properties = next(iter(store.kinds["model_versions"].values()))["customProperties"]
    assert properties["test_accuracy"]["double_value"] == 0.975


def test_a_model_registry_that_is_away_is_one_warning_and_the_promotion_holds(
    flotilla, workdir, monkeypatch, caplog
):
    monkeypatch.delenv(addresses.URI, raising=False)
    monkeypatch.setenv(addresses.HUB, "http://127.0.0.1:1")
    code, out, _ = flotilla("promote", "digits", "3", "--json")
    assert (code, answer(out)["version"]) == (0, 3)
    assert registry.champion_number(storage.uri_of(workdir), "digits") == 3
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "cannot tell the model registry that version 3 of digits was promoted" in line
    assert "; the promotion is valid, and the next run" in line


def test_a_champion_that_is_gone_leaves_the_other_versions(flotilla, workdir):
    root = storage.uri_of(workdir)
    storage.delete(registry.version(root, "digits", 2).uri)
    code, out, _ = flotilla("list", "--json")
    assert (code, [row["version"] for row in answer(out)["models"]]) == (0, [1, 3])
    code, _, err = flotilla("show", "digits")
    assert (code, err.count("\n")) == (1, 1)
    assert "the champion no longer exists: digits has no version 2 below" in err
    assert flotilla("show", "digits", "3")[0] == 0
    assert flotilla("promote", "digits", "3")[0] == 0
    assert registry.champion(root, "digits").number == 3


def test_a_model_whose_champion_is_not_known_hides_no_other(flotilla, workdir, tmp_path):
    root = storage.uri_of(workdir)
    uri = storage.uri_of(tmp_path / "model-1")
    registry.register(root, "other", uri, lineage=LINEAGE, scratch=tmp_path)
    registry.promote(root, "other", 1, after=0, by="me")
    newest = storage.local_path(registry.promotions(root, "digits")[-1].uri)
    (newest / "MANIFEST.json").write_text("")
    code, out, err = flotilla("list", "--json")
    rows = answer(out)["models"]
    assert code == 1
    found = [(row["name"], row["champion"]) for row in rows]
    assert found == [*[("digits", False)] * 3, ("other", True)]
    assert err.count("flotilla: the newest promotion of digits cannot be read") == 1
    for words in (["list", "digits"], ["show", "digits"], ["rollback", "digits"]):
        code, out, err = flotilla(*words)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "the newest promotion of digits cannot be read" in err
