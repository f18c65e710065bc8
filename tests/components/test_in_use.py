"""Tests that a published code bundle is marked as used, and published again if it was removed."""

import pytest

from flotilla.components import in_use
from flotilla.pipelines.retention.inventory import read
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "mine"
    home.mkdir()
    (home / "blocks.py").write_text("A = 1\n")
    return home


def test_it_is_in_the_configuration_and_as_young_as_the_call(folder, tmp_path):
    root = storage.uri_of(tmp_path / "root")
    config, made = in_use.publish_code(Config(), folder, root)
    assert Config.model_validate_json(config.model_dump_json()).code == made.uri
    place = storage.local_path(made.uri) / "MANIFEST.json"
    place.write_text(place.read_text().replace('"created": "20', '"created": "19'))
    path = f"code/{storage.name_of(made.uri)}"
    last = read(root, tmp_path).items[path].last.timestamp()
    assert last == pytest.approx(in_use.last_use(root, path), abs=1e-3)
    assert last > 0


def test_one_that_is_removed_meanwhile_is_published_again(folder, tmp_path, monkeypatch):
    use, asked = in_use.use, []

    def removed_once(uri):
        if not asked:
            storage.delete(uri)
        asked.append(uri)
        return use(uri)

    monkeypatch.setattr(in_use, "use", removed_once)
    _, made = in_use.publish_code(Config(), folder, storage.uri_of(tmp_path / "root"))
    assert asked == [made.uri, made.uri]
    storage.verify(made.uri)
