"""Fine-tuning under every strategy: weights of a `.keras` file, another head, frozen layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.cluster.launched import launched
from tests.cluster.stateful import net
from tests.cluster.test_warm_started import values
from trainer import storage
from trainer.checkpoints.index import list_checkpoints
from trainer.config.schema import STRATEGIES
from trainer.events import WarmStart
from trainer.models.registry import reset_uids
from trainer.models.spec import InputSpec

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

# `make test-long` runs the others.
QUICK = ("async_parameter_server",)
FROZEN = ["dense/*", "batch_normalization/*"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A file with the model of three classes, of which each variable has a value of its own."""
    reset_uids()
    model = net(InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(3,)))
    for number, variable in enumerate(model.variables):
        if "seed" not in variable.path:
            variable.assign(np.full(variable.shape, 0.01 * (number + 1)))
    file = tmp_path_factory.mktemp("pretrained") / "model.keras"
    model.save(file)
    return file


@pytest.mark.parametrize(
    "strategy",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in STRATEGIES],
)
def test_what_is_frozen_stays_as_in_the_file_and_all_else_is_trained(
    pretrained, dataset, tmp_path, strategy
):
    config = {
        "model": {"name": "tests.cluster.stateful:net"},
        "training": {
            "strategy": strategy,
            "steps": 20,
            "validate_every": 0,
            "warm_start": {"from": str(pretrained), "exclude": ["dense_1/*"]},
            "freeze": FROZEN,
        },
        "cluster": {"parameter_servers": 2, "workers": 2},
    }
    with launched(config, dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 0, said
    left = {event.left["excluded"] for event in run.events(WarmStart)}
    assert left == {2}
    (first, _), *_, (last, _) = list_checkpoints(run.checkpoints)
    assert storage.read_manifest(last).fields["warmed_from"] == storage.uri_of(pretrained)
    before, after = values(first), values(last)
    moved = {key for key in before if (before[key] != after[key]).any() and "seed" not in key}
    assert len(moved) == 2
    assert all(key.startswith("variables/model.Sdense_1.S") for key in moved)
    for variable in keras.saving.load_model(pretrained).variables:
        layer, name = variable.path.split("/")
        if layer in ("dense", "batch_normalization"):
            (value,) = [after[key] for key in after if f".S{layer}.S{name}/" in key]
            np.testing.assert_array_equal(value, variable.numpy(), err_msg=variable.path)
