"""Compares the accuracy of a recommender with growing tables on servers and with dense tables.

The dataset is `examples/clicks_large` with fewer ids, and each id has its own row on both sides. On
one side, two asynchronous workers train with two parameter servers, which create the row of an id
when it first occurs. On the other side, one process trains with `keras.layers.Embedding` tables,
which have a row for every id of the training split from the start. The difference is the total loss
of accuracy from tables, workers and servers. Both sides use the same number of batches, the same
batch size and a learning rate that decays to zero. They are evaluated on the same test split. Each
round has another seed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

from benchmarks import launched
from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import read_index
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.data.read import labelled_columns, stage_shards
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import two_tower
from flotilla.trainer.models.spec import InputSpec

FILE = Path(__file__).parents[1] / "examples/clicks_large/clicks_large.yaml"
SEEDS = (1, 2, 3)
LOST = 0.002
EVENTS, TEST_EVENTS, BATCH = 1_200_000, 100_000, 512
TRUTH = {"users": 1_000_000, "items": 100_000, "events": EVENTS, "test_events": TEST_EVENTS}
# Each table has more rows than the dataset has ids, and admits every id at once.
TABLES = {
    "user": {"capacity": 131_072},
    "item": {"capacity": 131_072},
    "segment": {"capacity": 256},
    "category": {"capacity": 1024},
}
SETTINGS: Mapping[str, Any] = {
    **{f"data.builder_args.{name}": value for name, value in TRUTH.items()},
    "data.validation": 0,
    "training.batch_size": BATCH,
    "training.steps": 2 * EVENTS // BATCH,
    "training.checkpoint_every": 2 * EVENTS // BATCH,
    "training.validate_every": 0,
    "training.warm_start": '""',
    "training.schedule.name": "cosine",
    # Keras's own format would need a registered class for the initializer of the dense rows.
    "export.formats": "[saved_model]",
}
METRICS = ("auc", "query_auc")
Measured = Mapping[str, float]


def same_tables() -> Comparison:
    """Return 1 minus the AUC that growing tables lose to dense tables, for each seed."""
    # The dataset builder and the model are modules in the folder of this file.
    sys.path.append(str(FILE.parent))
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        config = _config({})
        dataset = prepare(config.data, storage.uri_of(folder), folder / "scratch").uri
        ids = folder / "ids.npz"
        np.savez(ids, **_ids(dataset, folder / "shards", list(TABLES)))
        growing, plain = iter(SEEDS), iter(SEEDS)
        pairs = alternating(
            len(SEEDS),
            lambda: _growing(next(growing), dataset, folder),
            lambda: _plain(next(plain), dataset, folder, ids),
        )
    lost = [plain["auc"] - own["auc"] for own, plain in pairs]
    return Comparison(
        name="1 minus the AUC that growing tables on servers lose to dense tables in one process",
        rounds=tuple(1 - each for each in lost),
        at_least=1 - LOST,
        more={
            "seeds": SEEDS,
            **{name: [[round(each[name], 5) for each in pair] for pair in pairs]
               for name in METRICS},
        },
    )  # fmt: skip


def dense_ranker(spec: InputSpec, *, ids: str, **arguments: Any) -> keras.Model:
    """Return `two_tower_ranker` with dense tables that have one row per id in a file.

    All other ids share the first row, which starts with zeros, as in a growing table.

    Args:
        spec: the argument `spec` of `two_tower_ranker`.
        ids: path of an `.npz` file with an array of integers for each table.
        **arguments: further arguments of `two_tower_ranker`; only the names of `tables` are used.
    """
    with np.load(ids) as found:
        listed = {name: found[name] for name in found.files}

    def dense(_spec: InputSpec, name: str, dimension: int, *_others: Any) -> Callable[[Any], Any]:
        places = keras.layers.IntegerLookup(vocabulary=listed[name], name=f"{name}_place")
        rows = keras.layers.Embedding(
            len(listed[name]) + 1, dimension, _zeros_first, name=f"{name}_embedding"
        )
        return lambda ids: rows(places(ids))

    with mock.patch.object(two_tower, "growing_table", dense):
        return two_tower.two_tower_ranker(spec, **arguments)


def _zeros_first(shape: Sequence[int], dtype: Any = None) -> Any:
    drawn = keras.initializers.get("uniform")((shape[0] - 1, *shape[1:]), dtype)
    return keras.ops.pad(drawn, [[1, 0], [0, 0]])


def _config(settings: Mapping[str, Any]) -> Config:
    whole = {**SETTINGS, "evaluation.baseline": "none", **settings}
    return load_config(FILE, [f"{key}={value}" for key, value in whole.items()])


def _ids(dataset: str, scratch: Path, names: Sequence[str]) -> dict[str, Any]:
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    files = stage_shards(dataset, scratch, "train")
    batches = [
        {name: each.numpy() for name, each in columns.items()}
        for _, columns in labelled_columns(spec, files, batch_size=EVENTS, columns=names)
    ]
    return {name: np.unique(np.concatenate([each[name] for each in batches])) for name in names}


def _growing(seed: int, dataset: str, folder: Path) -> Measured:
    settings = {"training.strategy": "async_parameter_server", "model.args.tables": TABLES}
    return _measured(_config({**settings, "training.seed": seed}), dataset, folder / f"own-{seed}")


def _plain(seed: int, dataset: str, folder: Path, ids: Path) -> Measured:
    settings = {
        "training.strategy": "single",
        "model.name": "benchmarks.dense_tables:dense_ranker",
        "model.args.ids": ids,
    }
    home = folder / f"plain-{seed}"
    return _measured(_config({**settings, "training.seed": seed}), dataset, home)


def _measured(config: Config, dataset: str, home: Path) -> Measured:
    trained = launched.trained(config, home, dataset)
    output = storage.join(storage.uri_of(home), "evaluation")
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        checkpoint = read_index(trained.checkpoints)[-1].uri
        found = evaluate(config, dataset, checkpoint, output, Path(scratch))
    return {name: found.metrics[name] for name in METRICS}
