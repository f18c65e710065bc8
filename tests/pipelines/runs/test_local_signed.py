"""A whole run whose model is signed: used with its key, refused after any change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines import models
from pipelines.cli import app
from pipelines.runs import local
from tests.trainer.signing.test_signing import key_pair
from trainer import storage
from trainer.errors import UserError
from trainer.promotion import registry
from trainer.signing import signing
from trainer.storage.manifest import checksum

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

CONFIG = Path(__file__).parents[3] / "configs" / "digits.yaml"
FEW = ["training.strategy=single", "training.steps=200", "gate.min.accuracy=0.5"]


def change(folder, name):
    """Change one byte of a file, and its checksum in the manifest, as an attacker would."""
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    manifest = folder / "MANIFEST.json"
    tree = json.loads(manifest.read_text())
    (entry,) = [each for each in tree["files"] if each["path"] == name]
    entry["crc32c"] = checksum(path).crc32c
    manifest.write_text(json.dumps(tree))


def test_a_signed_model_is_used_and_a_changed_one_is_not(tmp_path, monkeypatch, capsys):
    private, public = key_pair(tmp_path)
    monkeypatch.setenv(signing.PRIVATE_KEY, str(private))
    monkeypatch.setenv(signing.PUBLIC_KEY, str(public))
    workdir = tmp_path / "runs"
    result = local.run(CONFIG, settings=FEW, workdir=workdir)
    assert result.status == "blessed", result.message
    secret = private.read_text().splitlines()[1]
    written = [path for path in workdir.rglob("*") if path.is_file()]
    assert not [path for path in written if secret.encode() in path.read_bytes()]

    root = storage.uri_of(workdir)
    version = registry.version(root, "digits", 1)
    folder = storage.local_path(version.uri)
    assert signing.verify(version.uri)
    assert (folder / signing.PROVENANCE).is_file()
    assert models.promote(root, "digits", 1).version == 1

    def predict():
        words = ["predict", "digits", "--split", "test", "-o", str(tmp_path / "answers.csv")]
        code = app.called([*words, "--workdir", str(workdir)])
        return code, capsys.readouterr().err

    assert predict()[0] == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    graph = f"{version.manifest.fields['saved_model']}/saved_model.pb"
    made = len(registry.promotions(root, "digits"))
    for name in (graph, "labels.txt", signing.SIGNATURE):
        change(folder, name)
        with pytest.raises(UserError, match="signature is not valid"):
            models.promote(root, "digits", 1)
        for path, content in before.items():
            path.write_bytes(content)
    change(folder, graph)
    code, err = predict()
    assert (code, err.count("\n")) == (1, 1)
    assert "signature is not valid" in err
    assert len(registry.promotions(root, "digits")) == made
