"""Tests that models chosen automatically by `flotilla run` train the exact number of steps."""

import random

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import learnt_of_dataset, newest_checkpoint
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.features import length
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import choice
from flotilla.trainer.preflight.proposal import propose

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, EPOCHS, BATCH, WORKERS = 300, 3, 16, 2
WORDS = ("sun", "rain", "wind", "snow", "fog", "hail", "frost", "storm")
DRAW = random.Random(0)


def sentence(number):
    return f"{' '.join(DRAW.choices(WORDS, k=5))} on day {number}"


TABLES = {
    "text": ("report,y", lambda n: f"{sentence(n)},{'ab'[n % 2]}"),
    "two_tower": ("user_id,item_id,y", lambda n: f"{n % 23},{n * 7 % 31},{n % 2}"),
    "tabular": ("x,sky,person_id,y", lambda n: f"{n / 7},{WORDS[n % 8]},{n % 19},{'ab'[n % 2]}"),
}


@pytest.mark.parametrize(
    ("model", "strategy", "together"),
    [
        ("text", "async_parameter_server", 1),
        ("two_tower", "sync_parameter_server", WORKERS),
        ("tabular", "in_graph", WORKERS),
    ],
)
def test_all_examples_are_seen_as_often_as_is_asked_for(model, strategy, together, tmp_path):
    head, row = TABLES[model]
    source = tmp_path / "table.csv"
    source.write_text("\n".join([head, *(row(n) for n in range(ROWS))]) + "\n")
    settings = {
        "training.strategy": strategy,
        "training.epochs": EPOCHS,
        "training.batch_size": BATCH,
        "cluster.workers": WORKERS,
        "cluster.parameter_servers": 2,
        "cluster.in_process": "true",
    }
    config = propose(source, ["y"], [f"{key}={value}" for key, value in settings.items()]).config
    (tmp_path / "scratch").mkdir()
    uri = prepare(config.data, storage.uri_of(tmp_path / "data"), tmp_path / "scratch").uri
    spec = DatasetSpec.from_manifest(storage.read_manifest(uri), learnt_of_dataset(uri))
    config = length.resolve_for_dataset(choice.with_model(config, spec), uri)
    assert config.model.name == model
    checkpoints = storage.uri_of(tmp_path / "checkpoints")
    workdir = tmp_path / "tasks"
    local.launch(Job(config=config, dataset=uri, checkpoints=checkpoints, workdir=workdir))
    _, reached = newest_checkpoint(checkpoints)
    assert reached == -(-EPOCHS * spec.examples("train") // (BATCH * together))
