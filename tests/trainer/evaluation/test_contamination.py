"""Tests that test examples on which the champion or the model was trained are reported."""

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataGateConfig
from flotilla.trainer.data.columns import make_columns
from flotilla.trainer.data.splits import split_by_hash
from flotilla.trainer.evaluation.contamination import Judges
from flotilla.trainer.features.dataset_spec import SCHEMA
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.hashing import hashes
from tests.trainer.objectives import NO_ROLES
from tests.trainer.small_run import write_statistics

FEATURES = {
    "spent": FeatureSpec(shape=(), dtype="float32", stored="float"),
    "plan": FeatureSpec(shape=(), dtype="string", stored="bytes"),
}
SPLITS = ("train", "validation", "test")
LIMITS = DataGateConfig()


def customers(count, *, first=0):
    """Return columns of customers; a customer's values depend only on its number."""
    rng = np.random.default_rng(7)
    spent = rng.normal(size=first + count).astype(np.float32)
    plans = np.array([b"basic", b"family", b"pro"], object)[rng.integers(3, size=first + count)]
    return {"spent": spent[first:], "plan": plans[first:]}


def drawn(columns, seed=0):
    """Return each row's split, drawn by hash as for a source of files."""
    return split_by_hash(hashes(make_columns(FEATURES, columns), seed), validation=0.1, test=0.2)


def dataset(folder, columns, splits, spans=()):
    """Publish the rows as a dataset; `splits` has the split of each row."""
    chosen = {
        split: {name: each[splits == number] for name, each in columns.items()}
        for number, split in enumerate(SPLITS)
    }
    source = folder.with_name(f"{folder.name}-source")
    source.mkdir(parents=True)
    batches = {split: make_columns(FEATURES, each) for split, each in chosen.items()}
    write_statistics(source, batches, FEATURES, targets=())
    counts = {split: len(each["spent"]) for split, each in chosen.items()}
    fields = {
        "dataset_schema": SCHEMA, "block_rows": 512,
        "splits": {split: {"examples": n, "shards": [n]} for split, n in counts.items()},
        "features": {name: each.to_json() for name, each in FEATURES.items()},
        "inputs": list(FEATURES), "targets": [], **NO_ROLES, "spans": list(spans),
    }  # fmt: skip
    uri = storage.uri_of(folder)
    storage.publish(source, uri, kind="dataset", fields=fields)
    return uri


def published(folder, kind, **fields):
    source = folder.with_name(f"{folder.name}-source")
    source.mkdir(parents=True)
    uri = storage.uri_of(folder)
    storage.publish(source, uri, kind=kind, fields=fields)
    return uri


def champion(folder, trained, **lineage):
    """Publish a model version that was trained on a dataset, with its lineage."""
    made_from = {"dataset": trained, "checkpoint": ""}
    lineage = {"dataset": trained, "metrics": {"auc": 0.9}, **lineage}
    return published(folder / "version", "model", made_from=made_from, lineage=lineage)


def said(judged, uri):
    found = Judges.load(judged, LIMITS).judge_champion(uri, "auc", {"auc": 0.8})
    return found["remarks"], found["own"]


def compared(folder, before, now):
    """Publish the datasets of a champion and of this run, both as (rows, splits, spans)."""
    uris = [dataset(folder / name, *each) for name, each in (("before", before), ("now", now))]
    return said(uris[1], champion(folder, uris[0]))


def test_a_source_that_only_grew_says_nothing(tmp_path):
    rows = customers(2000)
    old = {name: each[:1200] for name, each in rows.items()}
    remarks, own = compared(tmp_path, (old, drawn(old)), (rows, drawn(rows)))
    assert remarks == []
    assert own["metrics"] == {"auc": 0.9}
    assert own["examples"] == int((drawn(old) == 2).sum())


def test_another_seed_counts_the_examples_that_the_champion_was_trained_on(tmp_path):
    rows = customers(2000)
    ours, theirs = drawn(rows), drawn(rows, seed=1)
    remarks, _ = compared(tmp_path, (rows, theirs), (rows, ours))
    both = int(((ours == 2) & (theirs == 0)).sum())
    assert remarks[0].startswith(
        f"{both} of {(ours == 2).sum()} test examples were in the champion's training split, so "
        "its metrics are too optimistic"
    )
    # Most of the champion's own test examples are not among these test examples.
    assert len(remarks) == 2
    assert remarks[1].endswith(": AUC 0.9 there, 0.8 here")


def test_a_few_examples_are_counted(tmp_path):
    rows = customers(2000)
    ours = drawn(rows)
    theirs = ours.copy()
    theirs[np.flatnonzero(ours == 2)[:8]] = 0
    (remark,), _ = compared(tmp_path, (rows, theirs), (rows, ours))
    assert remark.startswith(f"8 of {(ours == 2).sum()} test examples were")


def test_equal_answers_by_chance_are_none_that_it_was_trained_on(tmp_path):
    rng = np.random.default_rng(3)
    rows = customers(2000)
    rows["spent"] = rng.integers(4, size=2000).astype(np.float32)
    theirs, ours = (rng.choice(3, 2000, p=[0.7, 0.1, 0.2]) for _ in range(2))
    assert compared(tmp_path, (rows, theirs), (rows, ours))[0] == []


def test_later_answers_that_repeat_more_often_are_no_advantage_of_the_champion(tmp_path):
    rng = np.random.default_rng(3)
    rows = customers(20_000)
    # The rows are in chronological order. The last rows, which form the test split, have fewer
    # distinct values.
    wide = np.where(np.arange(20_000) < 16_000, 9000, 900)
    rows["spent"] = rng.integers(wide).astype(np.float32)
    theirs, ours = (
        np.digitize(np.arange(20_000), edges) for edges in ([12_000, 14_000], [16_000, 18_000])
    )
    assert compared(tmp_path, (rows, theirs), (rows, ours))[0] == []


def test_other_deliveries_are_named_with_what_the_champion_reached_there(tmp_path):
    old, new = customers(1000), customers(1000, first=1000)
    (remark,), own = compared(
        tmp_path,
        (old, drawn(old), ["2026-03-01", "2026-03-02"]),
        (new, drawn(new), ["2026-03-03"]),
    )
    counts = [(drawn(each) == 2).sum() for each in (old, new)]
    assert remark == (
        f"The champion's own run of {own['date']} used other test examples "
        f"({counts[0]} of 2026-03-01 to 2026-03-02) than this run ({counts[1]} of 2026-03-03): AUC "
        "0.9 there, 0.8 here"
    )


def test_a_dataset_that_is_gone_cannot_be_known(tmp_path):
    rows = customers(300)
    now = dataset(tmp_path / "now", rows, drawn(rows))
    gone = storage.uri_of(tmp_path / "gone")
    (remark,), own = said(now, champion(tmp_path, gone))
    assert "cannot be read, so the champion may" in remark
    assert gone in remark
    assert own["metrics"] == {"auc": 0.9}


@pytest.mark.parametrize("whose", ["champion", "challenger"])
def test_weights_that_training_began_with_were_trained_as_well(tmp_path, whose):
    rows = customers(1000)
    first = dataset(tmp_path / "first", rows, drawn(rows, seed=1))
    now = dataset(tmp_path / "now", rows, drawn(rows))
    begun = published(tmp_path / "begun", "checkpoint", global_step=9, dataset=first)
    between = published(
        tmp_path / "between", "checkpoint", global_step=9, dataset=now, warmed_from=begun
    )
    if whose == "champion":
        same = {name: each[:900] for name, each in rows.items()}
        trained = dataset(tmp_path / "trained", same, drawn(same))
        remarks, _ = said(now, champion(tmp_path, trained, warmed_from=between))
        assert len(remarks) == 1
    else:
        own = published(tmp_path / "own", "checkpoint", global_step=9, warmed_from=between)
        remarks = Judges.load(now, LIMITS).remarks(own)
        assert f"({between})" in remarks[0]
    both = int(((drawn(rows) == 2) & (drawn(rows, seed=1) == 0)).sum())
    assert remarks[0].startswith(f"{both} of ")


def test_a_model_that_was_trained_on_its_own_test_examples_is_named(tmp_path):
    rows = customers(500)
    splits = drawn(rows)
    again = np.flatnonzero(splits == 2)[:7]
    rows = {name: np.concatenate([each, each[again]]) for name, each in rows.items()}
    now = dataset(tmp_path / "now", rows, np.concatenate([splits, np.zeros(7, np.int8)]))
    own = published(tmp_path / "own", "checkpoint", global_step=9)
    (remark,) = Judges.load(now, LIMITS).remarks(own)
    assert remark.startswith(f"7 of {(splits == 2).sum()} test examples are also in the training")


def test_of_large_splits_the_share_is_that_of_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("flotilla.trainer.features.statistics.one_pass.MOST_HASHES", 500)
    rows = customers(20_000)
    ours, theirs = drawn(rows), drawn(rows, seed=1)
    remarks, _ = compared(tmp_path, (rows, theirs), (rows, ours))
    both, whole = int(((ours == 2) & (theirs == 0)).sum()), int((ours == 2).sum())
    about = int(remarks[0].split()[1])
    assert remarks[0].startswith(f"about {about} of {whole} test examples (")
    assert about == pytest.approx(both, rel=0.2)


def test_a_dataset_of_an_earlier_version_judges_nothing(tmp_path):
    (tmp_path / "bare").mkdir()
    assert Judges.load(storage.uri_of(tmp_path / "bare"), LIMITS) is None
