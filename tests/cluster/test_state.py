"""A model with BatchNorm, Dropout, an L2 loss and clipping, under every strategy, to its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.launched import Launched, launched
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.config.load import parse_config
from trainer.config.schema import STRATEGIES
from trainer.evaluation.evaluate import evaluate
from trainer.export.export import export
from trainer.promotion import gate

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# In one graph or one process nobody else moves the state; of synchronous updates
# `test_sync_parameter_server` compares it with that of one process.
SEEN_ELSEWHERE = {"single", "in_graph", "sync_parameter_server"}


def settings(strategy: str, steps: int) -> dict[str, Any]:
    clipping = {"global_clipnorm": 0.5}
    return {
        "model": {"name": "tests.cluster.stateful:net"},
        "training": {
            "strategy": strategy,
            "steps": steps,
            "optimizer": {"name": "adam", "learning_rate": 0.01, "args": clipping},
            "checkpoint_every": 1000,
            "validate_every": 200,
        },
        "cluster": {"parameter_servers": 2, "workers": 2},
        "gate": {"min": {"accuracy": 0.9}},
    }


def state(run: Launched) -> dict[str, np.ndarray]:
    """Return what the newest checkpoint says of moving averages and seeds."""
    uri, _ = newest_checkpoint(run.checkpoints)
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    wanted = ("moving_mean", "moving_variance", "seed_generator_state")
    return {
        short: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        for short in wanted
        if short in name
    }


def trained(strategy: str, steps: int, dataset: str, folder: Path) -> Launched:
    with launched(settings(strategy, steps), dataset, folder) as run:
        code, said = run.end()
    assert code == 0, said
    assert run.newest() == steps
    return run


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(each, marks=pytest.mark.long if each in SEEN_ELSEWHERE else ())
        for each in STRATEGIES
    ],
)
def test_state_is_trained_saved_resumed_and_exported(dataset, tmp_path, strategy):
    run = trained(strategy, 300, dataset, tmp_path)
    before = state(run)
    assert (before["moving_mean"] != 0).all()
    assert (before["moving_variance"] != 1).all()
    assert before["seed_generator_state"][1] > 0
    after = state(trained(strategy, 400, dataset, tmp_path))
    # Were it not restored, a hundred steps would count fewer draws than the three hundred before.
    assert after["seed_generator_state"][0] == before["seed_generator_state"][0]
    assert after["seed_generator_state"][1] > before["seed_generator_state"][1]
    assert (after["moving_mean"] != before["moving_mean"]).any()
    _export(run, parse_config(settings(strategy, 400)), dataset, tmp_path)


def _export(run: Launched, config: Any, dataset: str, folder: Path) -> None:
    checkpoint, _ = newest_checkpoint(run.checkpoints)
    evaluation, decision, model = (
        storage.uri_of(folder / name) for name in ("evaluation", "decision", "model")
    )
    scratch = folder / "scratch"
    scratch.mkdir()
    evaluate(config, dataset, checkpoint, evaluation, scratch)
    assert gate.check(config, evaluation, decision).blessed
    # Raises when what is loaded again answers otherwise than the model in memory.
    export(config, dataset, checkpoint, decision, model, scratch)
    assert storage.verify(model).kind == "model"
