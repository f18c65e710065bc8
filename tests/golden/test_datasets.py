"""Tests which TFDS datasets are supported, from their metadata and without a download."""

import re
from typing import Any, NamedTuple

import pytest
import tensorflow_datasets as tfds
import yaml

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import TaskConfig
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.features import select
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks import registry as tasks
from tests.conftest import ROOT
from tests.golden.datasets import DATASETS

REFERENCE = ROOT / "docs" / "reference"
MOST_STEPS = 3
HEAD = """<!-- Generated from the code by `make golden`. -->
# Datasets of TFDS

{total} well-known supervised datasets of tensorflow-datasets {version}. {taken} work without
settings. {one} need one key of `data`, and {asked} need two, which are shown in parentheses (sizes
and labels are examples). {refused} is rejected. The last word is the task that `task.name: auto`
chooses. [Your own dataset](../how-to/own-dataset.md#roles) explains the keys. The values of a
dataset are checked when it is prepared.

"""


class Row(NamedTuple):
    """A dataset's error without settings, its settings, the error with them, and the task."""

    first: str
    section: dict[str, Any]
    last: str
    task: str


def answer(name, section, data_dir):
    config = parse_config({"data": {"dataset": name, **section}}).data
    try:
        return select(config, datasets.builder(config, data_dir).info), ""
    except UserError as error:
        return None, str(error)


def row(name, data_dir):
    """Check a dataset without settings, then with its settings and the suggested sizes."""
    _, first = answer(name, {}, data_dir)
    assert "\n" not in first
    _, section = DATASETS[name]
    for _ in range(MOST_STEPS):
        found, last = answer(name, section, data_dir)
        sizes = re.search(r"set data.shapes to (\{.*?\]\})", last)
        if not sizes:
            break
        section = {**section, "shapes": yaml.safe_load(sizes[1])}
    return Row(first, section, last, task_of(found) if found else "")


def task_of(found):
    spec = DatasetSpec(
        features=found.specs,
        inputs=found.inputs,
        targets=found.targets,
        shards={},
        weight=found.weight,
        group=found.group,
    )
    return tasks.create(TaskConfig(), spec).name


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nothing")
    return {name: row(name, folder) for name in DATASETS}


def asked(message):
    """Return the first key in a message, or "" if it is not a key of the data section."""
    key = message.partition(":")[0].removeprefix("data.")
    return key if key in DataConfig.model_fields and "package.module" not in message else ""


def test_a_dataset_is_taken_or_asks_for_one_key(rows):
    assert len(rows) == 71
    able = [name for name, each in rows.items() if not each.first or asked(each.first)]
    assert len(able) >= 66
    assert not [name for name in able if rows[name].last or not rows[name].task]


def test_the_table_is_what_they_answer(rows, golden):
    lines, counts = [], dict.fromkeys(("taken", "one", "asked", "refused"), 0)
    for name, each in rows.items():
        kind, said = described(each)
        counts[kind] += 1
        how = yaml.safe_dump(each.section, default_flow_style=True, width=1000).strip()
        how = f"`{how}`" if each.section else ""
        task = f"`{each.task}`" if each.task else ""
        facts = f" ({how})" if how else ""
        ends = f"; {said if kind == 'refused' else task}"
        lines.append(f"- `{name}`{facts}: {DATASETS[name][0]}{ends}")
    head = HEAD.format(total=len(rows), version=tfds.__version__, **counts)
    golden("datasets.md", head + "\n".join(lines) + "\n", REFERENCE)


def described(each):
    if each.last:
        return "refused", f"refused: {each.last}"
    if not each.first:
        return "taken", ""
    return "one" if set(each.section) == {asked(each.first)} else "asked", ""
