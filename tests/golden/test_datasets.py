"""Which datasets of TFDS are taken, by what they say of themselves: no network, no download."""

import re

import pytest
import tensorflow_datasets as tfds
import yaml

from tests.conftest import ROOT
from tests.golden.datasets import DATASETS
from trainer.config.load import parse_config
from trainer.config.schema import DataConfig
from trainer.data import datasets
from trainer.data.features import select
from trainer.errors import UserError

REFERENCE = ROOT / "docs" / "reference"
MOST_STEPS = 3
HEAD = """<!-- Generated from the code by `make golden`. -->
# Which datasets are taken

{total} well-known supervised datasets of TFDS, chosen before any was asked, by what each says of
itself (`DatasetInfo` of tensorflow-datasets {version}): {taken} are taken as they are, {one} ask
for one key and are taken with it, {asked} ask for one key and then for another, {refused} is
refused. The last column has settings with which each is taken: the sizes are those of the message,
the labels are a choice. What a key means: [your own dataset](../how-to/own-dataset.md#roles). That
a dataset is taken says that it can be prepared and read; its values are checked meanwhile.

| dataset | what it is | answer | taken with |
| --- | --- | --- | --- |
"""


def answer(name, section, data_dir):
    """Return "" where a dataset is taken, otherwise the message."""
    config = parse_config({"data": {"dataset": name, **section}}).data
    try:
        select(config, datasets.builder(config, data_dir).info)
    except UserError as error:
        return str(error)
    return ""


def followed(name, section, data_dir):
    """Return the settings after what the messages suggest for shapes, and the last message."""
    for _ in range(MOST_STEPS):
        message = answer(name, section, data_dir)
        found = re.search(r"set data.shapes to (\{.*?\]\})", message)
        if not found:
            break
        section = {**section, "shapes": yaml.safe_load(found[1])}
    return section, message


def row(name, data_dir):
    """Return the key that a dataset asks for, and the settings with which it is taken."""
    _, chosen = DATASETS[name]
    first = answer(name, {}, data_dir)
    section, last = followed(name, chosen, data_dir)
    assert "\n" not in first
    return first, section, last


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nothing")
    return {name: row(name, folder) for name in DATASETS}


def asked(message):
    """The key that a message names first, where it is one of the data section."""
    key = message.partition(":")[0].removeprefix("data.")
    return key if key in DataConfig.model_fields and "package.module" not in message else ""


def test_a_dataset_is_taken_or_asks_for_one_key(rows):
    assert len(rows) == 71
    able = [name for name, (first, _, _) in rows.items() if not first or asked(first)]
    assert len(able) >= 66
    # With the settings of the table, each of them is taken.
    assert not [name for name in able if rows[name][2]]


def test_the_table_is_what_they_answer(rows, golden):
    lines, counts = [], dict.fromkeys(("taken", "one", "asked", "refused"), 0)
    for name, (first, section, last) in rows.items():
        kind, said = described(first, section, last)
        counts[kind] += 1
        how = f"`{yaml.safe_dump(section, default_flow_style=True, width=1000).strip()}`"
        lines.append(f"| `{name}` | {DATASETS[name][0]} | {said} | {how if section else ''} |")
    head = HEAD.format(total=len(rows), version=tfds.__version__, **counts)
    golden("datasets.md", head + "\n".join(lines) + "\n", REFERENCE)


def described(first, section, last):
    if last:
        return "refused", f"refused: {last}"
    if not first:
        return "taken", "taken"
    key = asked(first)
    return "one" if set(section) == {key} else "asked", f"asks for `data.{key}`"
