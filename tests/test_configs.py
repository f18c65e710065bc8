"""The configuration files that come with Flotilla."""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from flotilla.trainer.config.base import Whole
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config

FOLDER = Path(__file__).parents[1] / "configs"
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


def test_digits_shows_every_key():
    known = list(keys(Config))
    tree = yaml.safe_load((FOLDER / "digits.yaml").read_text(encoding="utf-8"))
    assert list(written(tree, known)) == known


def test_digits_shows_the_defaults():
    # Settings only for this dataset are left out.
    config = load_config(FOLDER / "digits.yaml", ["model.args={}", "gate.min={}"])
    assert config == Config()
