"""What KFP's cache goes by, and what is loaded for it: no TensorFlow."""

import itertools
import json
import subprocess
import sys

import pytest

from trainer import storage
from trainer.config.data import DataConfig
from trainer.config.load import parse_config
from trainer.data.key import dataset_key, seal
from trainer.data.spec import KIND
from trainer.errors import UserError

CONFIG = DataConfig(version="1.0.0")


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "röot")


@pytest.fixture
def publish(root, tmp_path):
    numbers = itertools.count()

    def published(config=CONFIG, version="1.0.0"):
        folder = tmp_path / f"made-{next(numbers)}"
        folder.mkdir()
        (folder / "train.tfrecord").write_bytes(b"records")
        identity = {"version": version}
        uri = storage.join(root, "datasets", dataset_key(config, identity))
        storage.publish(folder, uri, kind=KIND, fields={"identity": identity})
        return uri

    return published


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


def test_of_nothing_there_is_none(root):
    assert seal(CONFIG, root) == ""


def test_it_stays_while_the_dataset_does(root, publish):
    uri = publish()
    first = seal(CONFIG, root)
    assert storage.name_of(uri) in first
    assert seal(CONFIG, root) == first


def test_a_dataset_that_is_gone_is_forgotten(root, publish):
    storage.delete(publish())
    assert seal(CONFIG, root) == ""


def test_one_that_was_made_again_is_another(root, publish):
    uri = publish()
    first = seal(CONFIG, root)
    storage.delete(uri)
    publish()
    assert seal(CONFIG, root) not in {first, ""}


@pytest.mark.parametrize("content", [b"damaged", b"records of another length", None])
def test_a_damaged_one_is_forgotten(root, publish, content, caplog):
    path = storage.local_path(publish()) / "train.tfrecord"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert seal(CONFIG, root) == ""
    assert "train.tfrecord" in caplog.text
    assert "it is prepared again" in caplog.text


def test_what_others_prepare_changes_nothing(root, publish):
    publish()
    first = seal(CONFIG, root)
    publish(DataConfig(version="1.0.0", seed=5))
    publish(DataConfig(dataset="mnist"), "3.0.1")
    assert seal(CONFIG, root) == first


def test_where_the_files_come_from_changes_nothing(root, publish):
    publish()
    elsewhere = CONFIG.model_copy(update={"manual_dir": "/data", "partition": "reshuffle"})
    assert seal(elsewhere, root) == seal(CONFIG, root) != ""


def test_without_a_version_every_one_counts(root, publish):
    newest = DataConfig()
    publish(newest, "1.0.0")
    first = seal(newest, root)
    publish(newest, "2.0.0")
    assert seal(newest, root) not in {first, ""}
    assert first in seal(newest, root).splitlines()


def test_a_store_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "root").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="root"):
        seal(CONFIG, storage.uri_of(tmp_path / "root" / "deep"))


LOADED = "import json, sys; print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"


def loaded_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_reading_needs_no_tfds():
    loaded = loaded_by("import trainer.data.read")
    assert "tensorflow" in loaded
    assert "tensorflow_datasets" not in loaded


@pytest.mark.parametrize(
    "module", ["trainer.data", "trainer.data.spec", "trainer.data.key", "trainer.data.listing"]
)
def test_what_a_launcher_may_ask_needs_nothing(module):
    loaded = loaded_by(f"import {module}")
    assert not {"tensorflow", "tensorflow_datasets", "sklearn", "keras"} & loaded


def test_a_dataset_that_is_reused_needs_no_tensorflow(digits, tmp_path):
    root = storage.uri_of(storage.local_path(digits.uri).parents[1])
    loaded = loaded_by(
        "from pathlib import Path\n"
        "from trainer.config.data import DataConfig\n"
        "from trainer.data.prepare import prepare\n"
        f"found = prepare(DataConfig(), {root!r}, Path({str(tmp_path / 'scratch')!r}))\n"
        f"assert found.reused and found.uri == {digits.uri!r}"
    )
    assert "tensorflow_datasets" in loaded
    assert "tensorflow" not in loaded
