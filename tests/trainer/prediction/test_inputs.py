"""Tests that images, lists and dataset splits become model inputs as in training."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer import small_run
from tests.trainer.prediction import made_model
from tests.trainer.prediction.test_predict import asked, read

SIZED = {"photo": FeatureSpec(shape=(4, 6, 3), dtype="uint8", stored="image")}
RAW = {"image": FeatureSpec(shape=(8, 8, 1), dtype="uint8", stored="raw")}
WORDS = {
    "words": FeatureSpec(shape=(None,), dtype="int64", stored="sequence"),
    "words_length": FeatureSpec(shape=(), dtype="int64", stored="int"),
}


def mean(images):
    return {"prediction": tf.reduce_mean(tf.cast(images, tf.float32), axis=[1, 2, 3])}


def write_images(folder, sizes=((4, 6), (9, 9))):
    paths = []
    for number, (height, width) in enumerate(sizes):
        path = folder / f"class{number}" / f"{number}.png"
        path.parent.mkdir(parents=True)
        pixels = np.full((height, width, 3), 10 * (number + 1), np.uint8)
        Image.fromarray(pixels).save(path)
        paths.append(path)
    return paths


def test_a_folder_files_and_a_table_of_images_are_decoded_and_resized(tmp_path):
    data = {"image": {"size": [4, 6]}}
    model = made_model.published(tmp_path / "m", SIZED, mean, data=data)
    paths = write_images(tmp_path / "photos")
    asked(model, [tmp_path / "photos"], tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    assert found == [
        {"path": "class0/0.png", "prediction": 10.0},
        {"path": "class1/1.png", "prediction": 20.0},
    ]
    asked(model, list(reversed(paths)), tmp_path / "out.jsonl")
    found = [(row["path"], row["prediction"]) for row in read(tmp_path / "out.jsonl")]
    assert found == [(str(paths[1]), 20.0), (str(paths[0]), 10.0)]
    table = tmp_path / "photos" / "table.csv"
    table.write_text("photo\nclass1/1.png\nabsent.png\nclass0/0.png\n")
    summary, _ = asked(model, [table], tmp_path / "out.csv", skip_bad=True)
    assert [row["row"] for row in read(tmp_path / "out.csv")] == ["1", "3"]
    assert summary.skipped == 1


def test_images_as_pixels_have_their_size_or_are_broken(tmp_path):
    model = made_model.published(tmp_path / "m", RAW, mean)
    write_images(tmp_path / "photos", [(8, 8), (8, 9)])
    with pytest.raises(UserError, match=r"1.png: 'image' cannot be decoded: its size is \[8, 9\]"):
        asked(model, [tmp_path / "photos"], tmp_path / "out.csv")
    with pytest.raises(ConfigError, match="--columns: images have no columns"):
        asked(model, [tmp_path / "photos"], tmp_path / "out.csv", columns=("id",))
    rows = [{"image": np.full((8, 8, 1), value).tolist()} for value in (7, 300)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="row 2: 'image' is not uint8 of shape"):
        asked(model, [path], tmp_path / "out.csv")
    asked(model, [path], tmp_path / "out.jsonl", skip_bad=True)
    assert [row["prediction"] for row in read(tmp_path / "out.jsonl")] == [7.0]


def test_sequences_are_padded_and_have_answers_for_their_own_places(tmp_path):
    def answer(words, length):
        one = tf.one_hot(words % 2, 2)
        nothing = 0 * tf.cast(length, tf.float32)[:, None, None]
        return {"logits": one, "probabilities": one + nothing}

    labels = ["even", "odd"]
    kinds = {"": "sequence_labelling"}
    model = made_model.published(tmp_path / "m", WORDS, answer, kinds=kinds, labels=labels)
    path = tmp_path / "in.csv"
    path.write_text('words\n"[1, 2, 3]"\n"[]"\n[4]\n')
    asked(model, [path], tmp_path / "out.jsonl")
    found = [row["prediction"] for row in read(tmp_path / "out.jsonl")]
    assert found == [["odd", "even", "odd"], [], ["even"]]


def test_a_column_of_lists_for_a_number_is_named(tmp_path):
    model = made_model.sums(tmp_path / "m")
    path = tmp_path / "in.jsonl"
    path.write_text('{"age": [1, 2], "count": {"x": 1}, "city": "x"}\n')
    with pytest.raises(UserError, match="no column 'count'"):
        asked(model, [path], tmp_path / "out.csv")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    images, labels = small_run.digits()
    dataset = small_run.publish_dataset(folder / "dataset", (images, labels))
    model = made_model.published(folder / "m", RAW, mean, dataset=dataset, batch_size=10)
    return dataset, model, images


def test_a_split_of_the_models_own_dataset_or_of_one_that_is_named(digits, tmp_path):
    dataset, model, images = digits
    expected = images[: small_run.TEST_EXAMPLES].mean(axis=(1, 2, 3))
    for inputs in ((), (dataset,)):
        output = tmp_path / "out.jsonl"
        summary, _ = asked(model, inputs, output, split="test", columns=("label",))
        found = read(tmp_path / "out.jsonl")
        assert summary.rows == small_run.TEST_EXAMPLES
        assert found[-1]["row"] == small_run.TEST_EXAMPLES
        assert {row["label"] for row in found} == set("0123456789")
        assert sorted(row["prediction"] for row in found) == pytest.approx(sorted(expected))


def test_what_is_wrong_with_a_split_is_one_line(digits, tmp_path):
    dataset, model, _ = digits
    output = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="no split 'tests'; did you mean 'test'"):
        asked(model, [], output, split="tests")
    with pytest.raises(ConfigError, match="--columns: 'image' has more than one value"):
        asked(model, [], output, split="test", columns=("image",))
    with pytest.raises(UserError, match="is of kind 'model', not 'dataset'"):
        asked(model, [model], output, split="test")
    with pytest.raises(UserError, match="does not exist; pass the URI"):
        asked(model, [storage.uri_of(tmp_path / "absent")], output, split="test")
    other = made_model.sums(tmp_path / "m")
    with pytest.raises(UserError, match="has no feature 'age'"):
        asked(other, [dataset], output, split="test")
    assert not output.exists()
    assert sorted(os.listdir(tmp_path)) == ["m", "m-source"]


FORMS = {
    "title.csv": "Report\n\nt,x\na,1.5\nb,2.5\n",
    "sep.csv": "sep=;\nt;x\na;1.5\nb;2.5\n",
    "quote.tsv": 't\tx\na\t1.5\n"b\t2.5\n',
    "list.json": '[{"t": "a", "x": 1.5},\n {"t": "b", "x": 2.5}]',
}


@pytest.mark.parametrize("form", [*FORMS, "partitions"])
def test_files_are_laid_out_as_those_of_training(tmp_path, form):
    spec = FeatureSpec(shape=(), dtype="float32", stored="float")
    model = made_model.published(tmp_path / "m", {"x": spec}, lambda x: {"prediction": 2 * x})
    source = tmp_path / form
    if form == "partitions":
        for value in ("1.5", "2%2E5"):
            (source / f"x={value}").mkdir(parents=True)
            (source / f"x={value}" / "part-0.csv").write_text("t\na\n")
    else:
        source.write_text(FORMS[form])
    asked(model, [source], tmp_path / "out.jsonl")
    assert [row["prediction"] for row in read(tmp_path / "out.jsonl")] == [3.0, 5.0]
