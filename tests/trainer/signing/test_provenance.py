"""Where a registered version is from, as an in-toto statement."""

from __future__ import annotations

import hashlib
import json

from trainer.signing import provenance

LINEAGE = {
    "run_id": "digits-1",
    "dataset": "gs://bucket/datasets/d",
    "fingerprint": "ab" * 32,
    "checkpoint": "gs://bucket/digits-1/checkpoints/step-1",
    "warmed_from": "",
    "code": "gs://bucket/code/c",
    "config": "eabacc834897",
    "commit": "c" * 40 + "-dirty",
    "image": "host/name@sha256:" + "d" * 64,
}


def test_the_statement_names_the_files_and_what_they_were_made_from(tmp_path):
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "saved_model.pb").write_bytes(b"weights")
    (tmp_path / "model.sig").write_bytes(b"of other files")
    for _ in range(2):
        # Again: it is no subject of itself.
        provenance.write(tmp_path, "digits", LINEAGE, "2026-11-23T00:00:00.000Z")
    tree = json.loads((tmp_path / provenance.FILE).read_text())
    assert tree["_type"] == "https://in-toto.io/Statement/v1"
    assert tree["predicateType"] == "https://slsa.dev/provenance/v1"
    digest = {"sha256": hashlib.sha256(b"weights").hexdigest()}
    assert tree["subject"] == [{"name": "serving/saved_model.pb", "digest": digest}]
    build = tree["predicate"]["buildDefinition"]
    assert build["externalParameters"] == {"name": "digits", "configuration": "eabacc834897"}
    found = {each["name"]: each for each in build["resolvedDependencies"]}
    assert found.keys() == {"dataset", "checkpoint", "code", "flotilla", "image"}
    assert found["dataset"]["digest"] == {"sha256": "ab" * 32}
    assert found["flotilla"]["digest"] == {"gitCommit": "c" * 40}
    assert found["flotilla"]["annotations"] == {"changed": True}
    assert found["image"]["digest"] == {"sha256": "d" * 64}
    assert tree["predicate"]["runDetails"]["metadata"] == {
        "invocationId": "digits-1",
        "finishedOn": "2026-11-23T00:00:00.000Z",
    }


def test_what_is_not_known_is_left_out(tmp_path):
    provenance.write(tmp_path, "digits", {}, "2026-11-23T00:00:00.000Z")
    tree = json.loads((tmp_path / provenance.FILE).read_text())
    assert tree["subject"] == []
    assert tree["predicate"]["buildDefinition"]["resolvedDependencies"] == []
