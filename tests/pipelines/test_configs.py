"""Tests that the package's configurations are valid, described in a sentence, and easy to copy."""

import pytest
import yaml
from pydantic import BaseModel

from flotilla.pipelines.configs import copy_example, list_examples
from flotilla.trainer.config.base import Whole
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT


def test_each_file_has_a_sentence():
    found = {each.name: each.description for each in list_examples()}
    assert set(found) == {each.name for each in (ROOT / "configs").iterdir()}
    assert all(len(text) > 20 and text.endswith(".") for text in found.values())
    assert found["brackets.yaml"].startswith("One class for a padded sequence")


@pytest.mark.parametrize("name", ["digits", "digits.yaml", "tumors.csv", "tumors"])
def test_one_is_copied_by_its_name(tmp_path, name):
    path = copy_example(name, tmp_path)
    assert path.read_bytes() == (ROOT / "configs" / path.name).read_bytes()


def test_a_file_of_the_users_stays(tmp_path):
    (tmp_path / "digits.yaml").write_text("mine")
    (tmp_path / "wine.yaml").symlink_to("nowhere.yaml")
    for name in ("digits", "wine"):
        with pytest.raises(ConfigError, match=f"{name}.yaml exists"):
            copy_example(name, tmp_path)
    assert (tmp_path / "digits.yaml").read_text() == "mine"
    assert not (tmp_path / "nowhere.yaml").exists()


@pytest.mark.parametrize("name", ["../digits", "/etc/passwd", "digitz", "..", "."])
def test_a_name_or_a_folder_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="no example"):
        copy_example(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file"):
        copy_example("digits", tmp_path / "absent")


FOLDER = ROOT / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def keys(model, prefix=""):
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Whole):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def written(tree, known, prefix=""):
    for name, value in tree.items():
        if f"{prefix}{name}" in known:
            yield f"{prefix}{name}"
        else:
            yield from written(value, known, f"{prefix}{name}.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_valid(path):
    assert load_config(path).name == path.stem


def test_digits_shows_every_key_and_the_defaults():
    known = list(keys(Config))
    tree = yaml.safe_load((FOLDER / "digits.yaml").read_text(encoding="utf-8"))
    assert list(written(tree, known)) == known
    # Ignore settings that only this dataset needs.
    config = load_config(FOLDER / "digits.yaml", ["model.args={}", "gate.min={}"])
    assert config == Config()
