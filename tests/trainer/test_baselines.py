"""Simple models of any table, text or recommendation: what they learn, and what never fails."""

import numpy as np
import pytest

from trainer import storage
from trainer.baselines.baselines import baselines_of
from trainer.baselines.rows import Splits
from trainer.data.preparation.shards import ShardWriter
from trainer.data.records import encode
from trainer.data.spec import SCHEMA, DatasetSpec, FeatureSpec
from trainer.tasks.base import Target
from trainer.tasks.binary_classification import BinaryClassification

RANDOM = np.random.default_rng(7)
ROWS, TEST = 400, 120


def feature(values, classes=0):
    values = np.asarray(values)
    if values.dtype.kind in "OSU":
        return FeatureSpec(shape=values.shape[1:], dtype="string", stored="bytes")
    plain = {"i": "int", "f": "float"}.get(values.dtype.kind) if values.ndim == 1 else None
    stored = plain if values.dtype in (np.int64, np.float32) else None
    return FeatureSpec(
        shape=values.shape[1:],
        dtype=values.dtype.name,
        stored=stored or "raw",
        num_classes=classes,
    )


def published(folder, columns, targets=("label",), *, test=TEST, classes=None, **roles):
    """Publish columns as a dataset: the first rows to test on, all others to train on."""
    source = folder / "source"
    source.mkdir(parents=True)
    found = {name: feature(each, (classes or {}).get(name, 0)) for name, each in columns.items()}
    splits = {}
    for split, rows in (("train", slice(test, None)), ("test", slice(test))):
        writer = ShardWriter(source, split, 2)
        for record in encode(found, {name: each[rows] for name, each in columns.items()}):
            writer.add(record)
        writer.flush()
        splits[split] = {"examples": sum(writer.examples), "shards": writer.examples}
    fields = {
        "dataset_schema": SCHEMA,
        "splits": splits,
        "features": {name: each.to_json() for name, each in found.items()},
        "inputs": [name for name in columns if name not in {*targets, *roles.values()}],
        "targets": list(targets),
        **{"weight": "", "group": ""},
        **roles,
        "target_counts": {},
        "target_moments": {},
    }
    uri = storage.uri_of(folder / "dataset")
    storage.publish(source, uri, kind="dataset", fields=fields)
    spec = DatasetSpec.from_manifest(storage.read_manifest(uri))
    files = [folder / "dataset" / name for name in spec.files("test")]
    return Splits(spec=spec, uri=uri, test=files, scratch=folder / "scratch")


def in_order(values):
    """Return values of the test rows as shards have them: they are dealt out in turn."""
    return np.concatenate([values[:TEST][shard::2] for shard in range(2)])


def numbers(rows=ROWS):
    return RANDOM.normal(size=rows).astype("float32")


def target(name="label", dtype="int64", shape=(), **facts):
    return Target(name=name, shape=shape, dtype=dtype, **facts)


def by_name(found):
    return {each.name: each for each in found}


def test_a_table_of_two_classes(tmp_path):
    x, town = numbers(), RANDOM.integers(3, size=ROWS)
    label = (x + (town == 1) * 2 > 0.5).astype("int64")
    towns = np.array([b"Rome", b"Oslo", b"Bonn"], object)[town]
    splits = published(tmp_path, {"x": x, "town": towns, "label": label})
    found = by_name(baselines_of(BinaryClassification(target()), splits))
    assert list(found) == ["linear", "gradient boosting"]
    for each in found.values():
        assert each.skipped == ""
        assert (each.rows, each.of_rows) == (ROWS - TEST, ROWS - TEST)
        assert each.outputs.shape == (TEST, 1)
        assert ((each.outputs[:, 0] > 0) == in_order(label)).mean() > 0.9
    assert found["linear"].made_by == "scikit-learn LogisticRegression"


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_without_time_nothing_is_fitted(tmp_path, seconds):
    x = numbers()
    splits = published(tmp_path, {"x": x, "label": (x > 0).astype("int64")})
    (found,) = baselines_of(BinaryClassification(target()), splits, seconds)
    assert (found.name, found.skipped) == ("baseline", "it found no time")
