"""Tests that a model that does not fit its dataset is found before anything is downloaded."""

import tempfile

import pytest

from flotilla.pipelines.doctor.machine import fits
from flotilla.trainer.config.load import parse_config
from tests.pipelines.doctor.conftest import content

HUGE = (
    "import keras\n"
    "def table(spec):\n"
    "    given = spec.symbols()\n"
    "    rows = keras.layers.Embedding(10**11, 16)(keras.layers.Flatten()(given))\n"
    "    return keras.Model(given, keras.layers.Dense(spec.num_classes)(\n"
    "        keras.layers.GlobalAveragePooling1D()(rows)))\n"
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Create a working folder and a folder for temporary files."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_that_takes_too_long_is_ended_and_leaves_nothing(home):
    found = fits(parse_config({}), seconds=0.05)
    assert found.state == "warn"
    assert found.message == (
        "cannot check whether the model fits the dataset: the dry run of the model failed (no "
        "response after 0.05 s)"
    )
    assert content(home) == {"tmp"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "state", "message"),
    [
        ({"model": {"name": "mlp"}}, "ok",
         "mlp (7510 parameters) predicts label (int64 [] of 10 classes) from image (uint8 "
         "[8, 8, 1]) of digits; the task is classification, "
         "because the label 'label' (one int64 of 10 classes) names a class"),
        ({"model": {"name": "two_tower"}}, "fail",
         "model two_tower: the model needs 2 classes, but the dataset has 10; set data.types: "
         "{label: float} if it is a rating"),
        ({"data": {"dataset": "digitz"}}, "fail",
         "data.dataset: TFDS has no dataset 'digitz'; did you mean 'digits'?; "
         "to use your own builder, set data.dataset to package.module:Builder"),
        ({"model": {"name": "blocks:table"}}, "fail",
         "model blocks:table has 1,600,000,000,170 parameters, but this machine has only"),
    ],
)  # fmt: skip
def test_what_the_trainer_finds(home, tree, state, message):
    (home / "blocks.py").write_text(HUGE, encoding="utf-8")
    found = fits(parse_config(tree), seconds=600)
    assert found.state == state
    assert found.message.startswith(message)
    left = {name for name in content(home) if not name.startswith("__pycache__")}
    assert left == {"tmp", "blocks.py"}
