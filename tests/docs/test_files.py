"""The configurations of the guide to files make blessed models of a stranger's files."""

from __future__ import annotations

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml
from PIL import Image

from tests.conftest import ROOT
from tests.docs.markdown import read
from tests.pipelines.called import call
from trainer import storage
from trainer.config.schema import STRATEGIES
from trainer.data.spec import FeatureSpec
from trainer.models import tabular
from trainer.models.spec import InputSpec

GUIDE = read(ROOT / "docs" / "how-to" / "files.md", ROOT)
CONFIGS = {yaml.safe_load(block.text)["name"]: block.text for block in GUIDE.of("yaml")}
ROWS = 1500


def write_people(folder):
    random = np.random.default_rng(1)
    with (folder / "people.csv").open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["age", "city", "review", "bought"])
        for _ in range(ROWS):
            good = random.random() < 0.5
            said = random.choice(["Great,\nwould buy again!", "good: “works”"] if good else
                                 ["bad quality; broke", "awful, does not work"])  # fmt: skip
            review = f"{said} {random.integers(1000)} days"
            city = random.choice(["Rome", "Köln", "São Paulo"])
            age = "" if random.random() < 0.05 else f"{random.normal(40, 12):.1f}"
            chance = 0.95 if good and city != "Rome" else 0.05
            rows.writerow([age, city, review, "yes" if random.random() < chance else "no"])


def write_houses(folder):
    random = np.random.default_rng(2)
    with (folder / "houses.csv").open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["id", "built", "area", "town", "price"])
        for number in range(ROWS):
            area, built = random.uniform(30, 300), int(random.integers(1900, 2020))
            town = random.choice(["A", "B", "C"])
            price = area * (2000 if town == "A" else 1000) + (built - 1900) * 300
            rows.writerow([number, built, f"{area:.1f}", town, round(price)])


def write_photos(folder):
    random = np.random.default_rng(3)
    for name, colour in (("red", (200, 30, 30)), ("green", (30, 200, 30))):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(80):
            height, width = random.integers(20, 60, 2)
            pixels = np.clip(np.array(colour) + random.normal(0, 50, (height, width, 3)), 0, 255)
            form = "png" if number % 2 else "jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(
                folder / "photos" / name / f"{number}.{form}"
            )


def ran(folder, name, *settings):
    (folder / f"{name}.yaml").write_text(CONFIGS[name])
    words = [word for each in settings for word in ("--set", each)]
    return call("run", folder / "runs", f"{name}.yaml", *words, cwd=folder)


def test_they_are_short():
    assert CONFIGS.keys() == {"people", "houses", "photos"}
    assert all(len(text.strip().splitlines()) <= 15 for text in CONFIGS.values())


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("people", write_people, marks=pytest.mark.long),  # the test below runs it
        ("houses", write_houses),
        pytest.param("photos", write_photos, marks=pytest.mark.long),
    ],
)
def test_files_become_a_blessed_model(tmp_path, name, write):
    write(tmp_path)
    ended = ran(tmp_path, name)
    assert ended.code == 0, ended.err
    assert ended.answer["status"] == "blessed"


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_data_in_another_unit_are_refused_before_training(tmp_path):
    write_people(tmp_path)
    assert ran(tmp_path, "people", "training.steps=100").code == 0
    path = tmp_path / "people.csv"
    with path.open(newline="") as file:
        table = list(csv.reader(file))
    for row in table[1:]:
        row[0] = row[0] and str(1000 * float(row[0]))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(table)
    ended = ran(tmp_path, "people")
    assert (ended.code, ended.answer["status"]) == (3, "refused")
    assert "unit: age is that of the champion's dataset times 1000" in ended.answer["message"]
    assert "train_model" not in ended.statuses()


def test_the_model_of_the_guide_takes_raw_values():
    _, block = read(ROOT / "docs" / "how-to" / "own-model.md", ROOT).of("python")
    made = {}
    exec(block.text, made)
    columns = {
        "age": FeatureSpec(shape=(), dtype="float32", stored="float"),
        "review": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    }
    model = made["reviews"](InputSpec.of(columns, ["age", "review"], (2,)), words=3)
    given = {"age": tf.constant([3.0]), "review": tf.constant(["not bad"])}
    assert model(given).shape == (1, 2)


# Those of parameter servers run above, and in the tests of clusters.
@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_exports_what_was_learnt(tmp_path, strategy):
    write_people(tmp_path)
    ended = ran(tmp_path, "people", f"training.strategy={strategy}", "training.steps=200")
    assert ended.code == 0, ended.err
    model = ended.path_of("model")
    manifest = storage.read_manifest(storage.uri_of(model))
    loaded = tf.saved_model.load(model / manifest.fields["saved_model"])
    inputs = {
        "age": tf.constant([40.0, np.nan]),
        "city": tf.constant(["Köln", "a town that nobody knows"]),
        "review": tf.constant(["Great,\nwould buy again! 7 days", ""]),
    }
    answers = loaded.signatures["serving_default"](**inputs)
    # Its layers are registered by this.
    assert tabular
    own = keras.saving.load_model(model / "model.keras")
    expected = tf.nn.softmax(own(inputs)).numpy()
    np.testing.assert_allclose(answers["probabilities"].numpy(), expected, atol=1e-5)
    assert expected[0, 1] > 0.5
