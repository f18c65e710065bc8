"""Tests datasets end to end: key, publication, reuse, repair, MNIST and progress."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data import prepare as module
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.prepare import dataset_key, prepare, select_features
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data import made_builders as builders
from tests.trainer.works import works


@pytest.fixture
def own_digits(digits, tmp_path):
    """Return a copy of the digits that a test may damage, and a function to prepare it again."""
    root = tmp_path / "root"
    shutil.copytree(storage.local_path(digits.uri).parents[1], root)
    (published,) = (root / "datasets").iterdir()

    def again(**options):
        return prepare(DataConfig(**options), storage.uri_of(root), tmp_path / "scratch")

    return published, again


def images_of(values):
    return sorted(image.tobytes() for image in values["image"])


def test_the_manifest(digits):
    assert digits.uri.endswith(f"/root/datasets/{dataset_key(DataConfig(), {'version': '1.0.0'})}")
    assert storage.verify(digits.uri) == digits.manifest
    assert not digits.reused
    fields = digits.manifest.fields
    assert digits.manifest.kind == "dataset"
    assert (fields["dataset"], fields["version"]) == ("digits", "1.0.0")
    assert fields["splits"]["train"] == {"examples": 1293, "shards": [162] * 5 + [161] * 3}
    assert fields["splits"]["validation"] == {"examples": 144, "shards": [144]}
    assert fields["splits"]["test"] == {"examples": 360, "shards": [120] * 3}
    assert (fields["inputs"], fields["targets"]) == (["image"], ["label"])
    assert (fields["weight"], fields["group"]) == ("", "")
    assert fields["features"]["label"]["num_classes"] == 10
    assert fields["features"]["label"]["labels"] == [str(digit) for digit in range(10)]

    spec = DatasetSpec.from_manifest(digits.manifest)
    expected = [name for split in spec.shards for name in spec.files(split)]
    assert [entry.path for entry in digits.manifest.files] == sorted(
        [*expected, "examples.npz", "statistics.json"]
    )


def test_the_splits_are_disjoint_and_complete_and_an_image_keeps_its_label(digits, contents):
    names = ("train", "validation", "test")
    splits = [contents(digits, split) for split in names]
    assert splits[0]["image"].shape == (1293, 8, 8, 1)
    source = load_digits()
    images = np.round(source.images * 255 / 16).astype(np.uint8)
    found = sum((counted(each["image"], each["label"]) for each in splits), collections.Counter())
    assert found == counted(images, source.target)
    # All digits differ, so an example in two splits would be detected.
    assert set(found.values()) == {1}
    counts = [np.bincount(each["label"], minlength=10).tolist() for each in splits]
    of_label = digits.manifest.fields["target_counts"]["label"]
    assert counts == [of_label[split] for split in names]


def test_the_fingerprint_is_of_the_shards(digits):
    crcs = {split: [] for split in digits.manifest.fields["splits"]}
    folder = storage.local_path(digits.uri)
    spec = DatasetSpec.from_manifest(digits.manifest)
    for split, found in crcs.items():
        for name in spec.files(split):
            found.append(f"{google_crc32c.value((folder / name).read_bytes()):08x}")
    expected = hashlib.sha256(json.dumps(crcs, sort_keys=True).encode()).hexdigest()
    assert digits.manifest.fields["fingerprint"] == expected


def test_it_is_reused(own_digits, monkeypatch):
    published, again = own_digits
    before = {path: path.stat().st_mtime_ns for path in published.iterdir()}
    monkeypatch.setattr(datasets, "download", lambda *_: pytest.fail("prepared again"))
    # What does not change the content finds the same.
    for options in ({}, {"version": "1.0.0"}, {"manual_dir": "/no/such/folder"}):
        found = again(**options)
        assert found.reused
        assert found.uri == storage.uri_of(published)
    assert {path: path.stat().st_mtime_ns for path in published.iterdir()} == before


def test_another_seed_draws_another_validation(own_digits, contents, digits):
    _, again = own_digits
    other = again(seed=1)
    assert images_of(contents(other, "validation")) != images_of(contents(digits, "validation"))
    assert images_of(contents(other, "test")) == images_of(contents(digits, "test"))


def test_the_same_configuration_gives_the_same_bytes_and_nothing_elsewhere(
    digits, tmp_path, monkeypatch
):
    home = tmp_path / "home"
    (home / "here").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "here")
    again = prepare(DataConfig(), storage.uri_of(tmp_path / "root"), tmp_path / "scratch")
    assert not again.reused
    assert again.manifest.files == digits.manifest.files
    assert again.manifest.fields == digits.manifest.fields
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert {path.name for path in tmp_path.iterdir()} == {"home", "root", "scratch"}
    assert list((tmp_path / "scratch").iterdir()) == []


def damage(published):
    shard = published / "train-00003-of-00008.tfrecord"
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lambda published: (published / "statistics.json").unlink(),
        lambda published: os.truncate(published / "test-00000-of-00003.tfrecord", 100),
        lambda published: (published / "MANIFEST.json").write_text("{"),
        lambda published: (published / "MANIFEST.json").unlink(),
    ],
    ids=["bit", "missing", "short", "manifest", "unpublished"],
)
def test_a_damaged_dataset_is_made_again(own_digits, digits, caplog, harm):
    published, again = own_digits
    harm(published)
    found = again()
    assert not found.reused
    assert storage.verify(found.uri).same_content(digits.manifest)
    assert again().reused
    if warnings := [record for record in caplog.records if record.name == module.__name__]:
        assert "preparing it again" in warnings[0].getMessage()


def test_a_damaged_dataset_stays_until_there_is_another(own_digits, monkeypatch):
    published, again = own_digits
    damage(published)

    def fail(*_, **_options):
        raise UserError("no network")

    monkeypatch.setattr(datasets, "download", fail)
    with pytest.raises(UserError, match="no network"):
        again()
    assert (published / "MANIFEST.json").exists()


def test_one_that_was_put_right_meanwhile_is_kept(own_digits, digits, monkeypatch, caplog):
    published, again = own_digits
    damage(published)
    write = module._write

    def write_and_repair(*args):
        shutil.rmtree(published)
        shutil.copytree(storage.local_path(digits.uri), published)
        return write(*args)

    monkeypatch.setattr(module, "_write", write_and_repair)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert again().manifest == digits.manifest
    (warning, *_) = [record for record in caplog.records if record.name == module.__name__]
    assert "train-00003-of-00008.tfrecord has crc32c" in warning.getMessage()


def test_the_key_follows_the_content_only(monkeypatch):
    def key(version="1.0.0", **options):
        return dataset_key(DataConfig(**options), {"version": version})

    same = {key(), key(version="1.0.0"), key(manual_dir="x"), key(validation=0.1)}
    same.add(key(buckets=(2, 4)))
    other = {key("2.0.0"), key(seed=1), key(shards=7), key(validation=1), key(dataset="mnist")}
    monkeypatch.setattr(module, "SCHEMA", 99)
    other.add(key())
    assert len(same) == 1
    assert len(other - same) == 6
    # It is one name.
    for dataset, start in (("glue/cola", "glue-cola-"), ("some.module:B", "some.module-B-")):
        assert key(dataset=dataset).startswith(start)
        assert len(key(dataset=dataset)) == len(start) + 12


def test_an_unknown_dataset_leaves_nothing(root, scratch, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        prepare(DataConfig(dataset="digit"), root, scratch)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_scratch_or_a_root_that_cannot_be_written(root, tmp_path, scratch):
    (tmp_path / "file").write_text("")
    config = DataConfig(source=str(source(tmp_path)))
    for place in ((root, tmp_path / "file/scratch"), (storage.uri_of(tmp_path / "file"), scratch)):
        with pytest.raises(UserError) as caught:
            prepare(config, *place)
        assert str(tmp_path / "file") in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(scratch.iterdir()) == []


def test_what_a_dataset_would_have_is_known_without_preparing_it(tmp_path):
    found = select_features(DataConfig(), tmp_path / "scratch")
    assert (found.inputs, found.targets) == (("image",), ("label",))
    assert found.specs["label"].num_classes == 10
    assert found.specs["image"].shape == (8, 8, 1)
    assert [*(tmp_path / "scratch").iterdir()] == []


def source(folder: Path, rows: int = 400) -> Path:
    lines = [f"{i},{i / 7:.3f},{'yes' if i % 3 else 'no'}\n" for i in range(rows)]
    path = folder / "things.csv"
    path.write_text("a,b,label\n" + "".join(lines))
    return path


def test_a_csv_becomes_a_dataset_and_is_found_again(tmp_path: Path) -> None:
    path = source(tmp_path)
    config = DataConfig(source=str(path), shards=3)
    root = tmp_path.joinpath("root").as_uri()
    made = prepare(config, root, tmp_path / "scratch")
    spec = DatasetSpec.from_manifest(made.manifest)
    assert "/datasets/things.csv-" in made.uri
    assert spec.inputs == ("a", "b")
    assert spec.features["label"].labels == ("no", "yes")
    assert sum(spec.examples(split) for split in spec.shards) == 400
    assert len(spec.shards["train"]) == 3
    assert made.manifest.fields["dataset"] == str(path)
    assert made.manifest.fields["columns"][2] == {
        "name": "label", "type": "class", "why": "label of yes and no", "classes": 2,
    }  # fmt: skip
    assert prepare(config, root, tmp_path / "scratch").reused
    assert select_features(config, tmp_path / "scratch").specs == spec.features
    source(tmp_path, 500)
    assert prepare(config, root, tmp_path / "scratch").uri != made.uri


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"validation": 0.0}, "data.validation is 0 and data.splits has no test"),
        ({"splits": {"test": 1e-9}}, r"data.splits: data.source: .* has no example for the test"),
    ],
)
def test_splits_that_cannot_be(tmp_path: Path, keys: dict[str, object], line: str) -> None:
    config = DataConfig.model_validate({"source": str(source(tmp_path, 200)), **keys})
    with pytest.raises(UserError, match=line):
        prepare(config, tmp_path.joinpath("root").as_uri(), tmp_path / "scratch")


@pytest.fixture(scope="module")
def mnist(mnist_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    config = DataConfig(dataset="mnist", manual_dir=str(mnist_dir), validation=5000, shards=8)
    return prepare(config, storage.uri_of(folder / "root"), folder / "scratch")


def official(folder, part):
    """Read images and labels in the format of the official MNIST files (LeCun, Cortes, Burges)."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return images, labels


def counted(images, labels):
    """Count each pair of image and label, because two images may be equal."""
    return collections.Counter(
        (image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)
    )


@pytest.mark.slow
def test_every_image_is_the_official_one(mnist, mnist_dir, contents):
    train, validation, test = (
        counted(values["image"], values["label"])
        for values in (contents(mnist, split) for split in ("train", "validation", "test"))
    )
    assert train + validation == counted(*official(mnist_dir, "train"))
    assert test == counted(*official(mnist_dir, "t10k"))


ROWS = 3000


def as_csv(table, path):
    arrow_csv.write_csv(table, path)


def as_gzip(table, path):
    as_csv(table, path.with_suffix(""))
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    path.with_suffix("").unlink()


def as_lines(table, path):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("table.csv", as_csv),
        ("table.csv.gz", as_gzip),
        ("table.jsonl", as_lines),
        ("table.parquet", pq.write_table),
    ],
)
def test_each_pass_over_a_table_counts_its_rows(tmp_path, name, write):
    drawn = np.random.RandomState(0)
    columns = {"a": drawn.normal(size=ROWS), "b": drawn.normal(size=ROWS)}
    write(pa.table({**columns, "label": drawn.randint(0, 2, ROWS)}), tmp_path / name)
    config = DataConfig(source=str(tmp_path / name))
    with works() as (last, made):
        prepare(config, storage.uri_of(tmp_path / "root"), tmp_path / "scratch")
    # Progress is measured in bytes, because the number of rows is not known in advance.
    reading = next(each for each in made if each._what == "reading the files")
    assert reading._sized == pytest.approx(reading._size, rel=0.01)
    assert (last["reading the files"].done, last["reading the files"].total) == (ROWS, 0)
    for what in ("encoding the examples", "writing the shards"):
        assert (last[what].done, last[what].total, last[what].share) == (ROWS, ROWS, 1.0)
    published = last["publishing the dataset"]
    assert published.done == published.total > ROWS


def test_tfds_counts_what_it_generates(tmp_path):
    config = DataConfig(dataset=f"{builders.__name__}:Small", builder_args={})
    with works() as (last, _):
        prepare(config, storage.uri_of(tmp_path / "root"), tmp_path / "scratch")
    found = {what: each.done for what, each in last.items() if "generating" in what}
    assert found
    assert all(found.values())


SECTIONS = [
    {},
    {"label": "price"},
    {"label": ["price", "size"]},
    {"label": "price", "weight": "times"},
    {"label": "price", "group": "shop"},
    {"inputs": "size"},
    {"shapes": {"image": [8, 8, 3]}},
    {"shapes": {"image": [9, 9, 3]}},
]


def test_every_role_and_shape_is_another_dataset():
    configs = [parse_config({"data": each}).data for each in SECTIONS]
    assert len({dataset_key(each, {"version": "1.0.0"}) for each in configs}) == len(SECTIONS)


def test_one_name_is_a_list_of_one():
    text, several = (
        parse_config({"data": {"label": label, "inputs": label}}).data
        for label in ("price", ["price"])
    )
    assert text == several == DataConfig.model_validate_json(text.model_dump_json())
    assert dataset_key(text, {}) == dataset_key(several, {})


LOADED = "import json, sys; print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"


def loaded_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_reading_needs_no_tfds():
    loaded = loaded_by("import flotilla.trainer.data.read")
    assert "tensorflow" in loaded
    assert "tensorflow_datasets" not in loaded


@pytest.mark.parametrize(
    "module",
    [
        "flotilla.trainer.data",
        "flotilla.trainer.features.dataset_spec",
        "flotilla.trainer.data.listing",
    ],
)
def test_what_a_launcher_may_ask_needs_nothing(module):
    loaded = loaded_by(f"import {module}")
    assert not {"tensorflow", "tensorflow_datasets", "sklearn", "keras"} & loaded


def test_a_dataset_that_is_reused_needs_no_tensorflow(digits, tmp_path):
    root = storage.uri_of(storage.local_path(digits.uri).parents[1])
    loaded = loaded_by(
        "from pathlib import Path\n"
        "from flotilla.trainer.config.data import DataConfig\n"
        "from flotilla.trainer.data.prepare import prepare\n"
        f"found = prepare(DataConfig(), {root!r}, Path({str(tmp_path / 'scratch')!r}))\n"
        f"assert found.reused and found.uri == {digits.uri!r}"
    )
    assert "tensorflow_datasets" in loaded
    assert "tensorflow" not in loaded
