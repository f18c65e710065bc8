"""Tests signatures of models by OpenSSF model signing, with keys in files."""

import hashlib
import json
import shutil
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from flotilla.pipelines.doctor.machine import signatures
from flotilla.trainer import signing, storage
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.signing import PRIVATE_KEY, PUBLIC_KEY, SIGNATURE, UnsignedError
from flotilla.trainer.storage.publishing import choose_store
from tests.stores.fixtures import bucket_name

NONE = serialization.NoEncryption()


FIELDS = {"saved_model": "serving/digits/7", "inputs": [], "num_labels": 2}


def key_pair(folder, name="one", key=None, encryption=NONE):
    key = key or ec.generate_private_key(ec.SECP256R1())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(pem, form, encryption))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, spki))
    return private, public


@pytest.fixture
def keys(tmp_path, monkeypatch):
    private, public = key_pair(tmp_path)
    monkeypatch.setenv(PRIVATE_KEY, str(private))
    monkeypatch.setenv(PUBLIC_KEY, str(public))
    return private, public


def model(folder, name="model"):
    found = folder / name
    (found / "serving" / "digits" / "7").mkdir(parents=True)
    (found / "serving" / "digits" / "7" / "saved_model.pb").write_text("weights")
    (found / "labels.txt").write_text("0\n1\n")
    return found


def published(folder, name="model"):
    source = model(folder, name)
    signing.sign(source, FIELDS)
    uri = storage.uri_of(folder / f"published-{name}")
    storage.publish(source, uri, kind="model", fields=FIELDS)
    return uri


def test_without_a_key_nothing_is_signed_and_all_is_taken(tmp_path, monkeypatch):
    monkeypatch.delenv(PRIVATE_KEY, raising=False)
    monkeypatch.delenv(PUBLIC_KEY, raising=False)
    folder = model(tmp_path)
    (folder / SIGNATURE).write_text("of other files")
    assert not signing.sign(folder, FIELDS)
    assert not (folder / SIGNATURE).exists()
    assert not (folder / signing.FIELDS).exists()
    assert not signing.verify_fetched(folder, FIELDS, "here")
    assert signing.verify(published(tmp_path, "another")).kind == "model"
    assert signing.check() == []


def test_what_was_signed_is_verified(tmp_path, keys):
    uri = published(tmp_path)
    assert signing.verify(uri)
    assert signing.verify_fetched(tmp_path / "model", FIELDS, "here")
    assert len(signing.check()) == 2
    bundle = json.loads((tmp_path / "model" / SIGNATURE).read_text())
    assert "sigstore.bundle" in bundle["mediaType"]
    assert keys[0].read_text().splitlines()[1] not in json.dumps(bundle)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("how", ["changed", "added", "removed", "unsigned", "garbled", "other key"])
def test_what_is_not_what_was_signed_is_refused_in_one_line(tmp_path, monkeypatch, how):
    folder = model(tmp_path)
    signing.sign(folder, FIELDS)
    if how == "changed":
        (folder / "labels.txt").write_text("1\n0\n")
    elif how == "added":
        (folder / ".gitattributes").write_text("more")
    elif how == "removed":
        (folder / "labels.txt").unlink()
    elif how == "unsigned":
        (folder / SIGNATURE).unlink()
    elif how == "garbled":
        (folder / SIGNATURE).write_text("{")
    else:
        monkeypatch.setenv(PUBLIC_KEY, str(key_pair(tmp_path, "two")[1]))
    with pytest.raises(UnsignedError, match=r"not signed|not valid") as refused:
        signing.verify_fetched(folder, FIELDS, "s3://b/model")
    assert "s3://b/model" in str(refused.value)
    assert "\n" not in str(refused.value)


SERVED = ("serving/digits/8/saved_model.pb", "serving/digits/8/", "serving/digits/saved_model.pb")
UNNAMED = (*SERVED, "serving/digits/7/more.pb", ".git/x", "other/digits/9/a", "labels.txt.bak")


def plant(folder, path):
    """Add a file, or an empty folder, that no manifest names."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir() if path.endswith("/") else target.write_text("evil")


def refused(look):
    with pytest.raises(storage.Corrupt, match="which the manifest does not list") as it:
        look()
    assert "\n" not in str(it.value)


@pytest.mark.parametrize(
    ("path", "signed"),
    [
        *[(path, True) for path in UNNAMED],
        (SERVED[0], False),
        (SERVED[1], False),
        (".git/x", False),
    ],
)
def test_what_a_manifest_does_not_name_is_neither_promoted_nor_used(
    tmp_path, monkeypatch, request, path, signed
):
    if signed:
        request.getfixturevalue("keys")
    root, uri = storage.uri_of(tmp_path / "root"), published(tmp_path)
    made = registry.register(root, "digits", uri, lineage={}, scratch=tmp_path)
    registry.promote(root, "digits", 1, after=0, by="me")
    monkeypatch.setattr(signing.tempfile, "tempdir", str(tmp_path))
    plant(storage.local_path(made.uri), path.replace("digits/7", "digits/1"))
    refused(lambda: signing.verify(made.uri))
    refused(lambda: registry.promote(root, "digits", 1, after=1, by="me"))
    if signed or path in SERVED:
        used = tmp_path / "used"
        refused(lambda: signing.fetch(made.uri, used, made.manifest, only=lambda _: True))
        assert not used.exists()
    if signed:
        finding = signatures(root, "digits")
        assert finding.state == "fail"
        assert "does not list" in finding.message


def test_a_link_to_another_version_is_one(tmp_path):
    uri = published(tmp_path)
    (storage.local_path(uri) / "serving" / "digits" / "8").symlink_to("7")
    refused(lambda: signing.verify(uri))


def test_a_manifest_without_its_saved_model_is_refused(tmp_path):
    folder = model(tmp_path)
    for number, place in enumerate([None, 7, "", "serving/digits/9", "../x", "labels.txt", "/"]):
        uri = storage.uri_of(tmp_path / str(number))
        storage.publish(folder, uri, kind="model", fields={"saved_model": place})
        with pytest.raises(storage.Corrupt, match="lists no SavedModel"):
            registry.register(storage.uri_of(tmp_path), "digits", uri, lineage={}, scratch=tmp_path)


def test_a_manifest_that_names_two_versions_is_refused(tmp_path):
    folder, uri = model(tmp_path), storage.uri_of(tmp_path / "made")
    shutil.copytree(folder / "serving" / "digits" / "7", folder / "serving" / "digits" / "8")
    storage.publish(folder, uri, kind="model", fields=FIELDS)
    refused(lambda: signing.verify(uri))


@pytest.mark.parametrize("key", ["serving/digits/8/", "more"])
def test_what_is_served_from_a_bucket_is_what_is_named(tmp_path, gcs, key):
    bucket = bucket_name()
    gcs.create_bucket(bucket)
    uri = f"gs://{bucket}/made"
    storage.publish(model(tmp_path), uri, kind="model", fields=FIELDS)
    # A lost race between publishers leaves such a file, which no server loads.
    storage.write_bytes(f"{uri}/labels.txt.0123456789ab", b"")
    assert signing.verify(uri).fields == FIELDS
    # Storage tools represent a folder by an empty object whose name ends with a slash.
    choose_store(uri)._bucket.put(f"made/{key}", b"")
    refused(lambda: signing.verify(uri))


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("how", ["changed", "unsigned"])
def test_a_manifest_that_was_not_signed_is_refused(tmp_path, how):
    uri = published(tmp_path)
    path = tmp_path / "published-model" / "MANIFEST.json"
    tree = json.loads(path.read_text())
    if how == "changed":
        # The checksums are still valid, but an attacker has changed the order of the inputs.
        path.write_text(json.dumps({**tree, "inputs": ["b", "a"]}))
    else:
        # Earlier versions signed only the files.
        folder = tmp_path / "model"
        (folder / signing.FIELDS).unlink()
        config = signing._usable(PRIVATE_KEY, tmp_path / "one.pem")
        config.set_hashing_config(signing._hashing()).sign(folder, folder / SIGNATURE)
        uri = storage.uri_of(tmp_path / "files-alone")
        storage.publish(folder, uri, kind="model", fields=FIELDS)
    with pytest.raises(UnsignedError, match="the manifest is not signed, although"):
        signing.verify(uri)


@pytest.mark.parametrize("what", ["absent", "no key", "of RSA", "with a password", "public"])
def test_a_key_that_is_none_is_refused(tmp_path, monkeypatch, what):
    wrong = tmp_path / "wrong.pem"
    if what == "no key":
        wrong.write_text("hello")
    elif what == "of RSA":
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        wrong = key_pair(tmp_path, key=key)[0]
    elif what == "with a password":
        wrong = key_pair(tmp_path, encryption=serialization.BestAvailableEncryption(b"pw"))[0]
    elif what == "public":
        wrong = key_pair(tmp_path)[1]
    monkeypatch.setenv(PRIVATE_KEY, str(wrong))
    with pytest.raises(ConfigError, match=PRIVATE_KEY) as refused:
        signing.check()
    assert str(wrong) in str(refused.value)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("absent", ["model_signing", "OpenSSL"])
def test_without_the_packages_the_extra_is_named(tmp_path, monkeypatch, absent):
    for name in [name for name in sys.modules if name.partition(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ConfigError, match=r"flotilla\[signing\]"):
        signing.verify_fetched(model(tmp_path), FIELDS, "here")


@pytest.mark.usefixtures("keys")
def test_a_registered_version_is_signed_again(tmp_path):
    root, uri = storage.uri_of(tmp_path / "root"), published(tmp_path)
    made = registry.register(root, "digits", uri, lineage={}, scratch=tmp_path)
    assert signing.verify(made.uri)
    assert storage.read_file(made.uri, SIGNATURE) != storage.read_file(uri, SIGNATURE)
    assert registry.promote(root, "digits", 1, after=0, by="me").version == 1


@pytest.mark.usefixtures("keys")
def test_what_was_exchanged_before_the_copy_is_not_signed(tmp_path, monkeypatch):
    root, uri = storage.uri_of(tmp_path / "root"), published(tmp_path)
    monkeypatch.setenv(PRIVATE_KEY, str(key_pair(tmp_path, "two")[0]))
    other = published(tmp_path, "other")
    with pytest.raises(UnsignedError, match="not valid"):
        registry.register(root, "digits", other, lineage={}, scratch=tmp_path)
    assert registry.versions(root, "digits") == []
    assert signing.verify(uri)


@pytest.mark.usefixtures("keys")
def test_a_version_whose_signature_is_not_valid_is_not_promoted(tmp_path, monkeypatch):
    root, uri = storage.uri_of(tmp_path / "root"), published(tmp_path)
    registry.register(root, "digits", uri, lineage={}, scratch=tmp_path)
    monkeypatch.setenv(PUBLIC_KEY, str(key_pair(tmp_path, "two")[1]))
    with pytest.raises(UserError, match="not valid for the key of FLOTILLA_VERIFYING_KEY"):
        registry.promote(root, "digits", 1, after=0, by="me")
    assert registry.champion(root, "digits") is None


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
        # The second statement must not include the first one or the signature.
        signing.write_provenance(tmp_path, "digits", LINEAGE, "2026-11-23T00:00:00.000Z")
    tree = json.loads((tmp_path / signing.PROVENANCE).read_text())
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
    signing.write_provenance(tmp_path, "digits", {}, "2026-11-23T00:00:00.000Z")
    tree = json.loads((tmp_path / signing.PROVENANCE).read_text())
    assert tree["subject"] == []
    assert tree["predicate"]["buildDefinition"]["resolvedDependencies"] == []
