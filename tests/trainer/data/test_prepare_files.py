from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.data import DataConfig
from trainer.data.prepare import prepare, selected
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError


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
        "name": "label", "type": "class", "why": "label of texts", "classes": 2,
    }  # fmt: skip
    assert prepare(config, root, tmp_path / "scratch").reused
    assert selected(config, tmp_path / "scratch").specs == spec.features
    source(tmp_path, 500)
    assert prepare(config, root, tmp_path / "scratch").uri != made.uri


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"validation": 0.0}, "data.validation: 0, and data.splits has no test"),
        ({"shards": 500}, "data.shards: 500 shards for"),
        ({"splits": {"test": 1e-9}}, r"data.splits: no example of data.source: .* is for test"),
    ],
)
def test_splits_that_cannot_be(tmp_path: Path, keys: dict[str, object], line: str) -> None:
    config = DataConfig.model_validate({"source": str(source(tmp_path, 200)), **keys})
    with pytest.raises(UserError, match=line):
        prepare(config, tmp_path.joinpath("root").as_uri(), tmp_path / "scratch")
