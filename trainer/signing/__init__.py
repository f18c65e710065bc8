"""Signs models with OpenSSF model signing, and verifies that a model matches its manifest.

`model.sig` is a Sigstore bundle over the names and SHA-256 digests of all other files except the
manifest. It is made with a private elliptic-curve key, without an online service. One of the signed
files is `signed_fields.json`, a copy of the manifest's fields, such as the inputs and the version.
Two environment variables contain the paths of the key files, so that no configuration, record or
log contains a key.

`provenance.json` is the provenance of a registered version: an in-toto statement with the SLSA
provenance v1 predicate (https://slsa.dev/spec/v1.0/provenance). Its subjects are the other files,
and it is signed together with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.errors import Corrupt, report_errors
from flotilla.trainer.storage.manifest import MANIFEST, FileEntry, Manifest
from flotilla.trainer.storage.publishing import choose_store

SIGNATURE, FIELDS, PROVENANCE = "model.sig", "signed_fields.json", "provenance.json"
PRIVATE_KEY = "FLOTILLA_SIGNING_KEY"
PUBLIC_KEY = "FLOTILLA_VERIFYING_KEY"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "flotilla/training/v1"
_COMMIT_DIGITS = 40
_CREATE = {
    "private": "openssl ecparam -name prime256v1 -genkey -noout",
    "public": "openssl ec -in PRIVATE_KEY_FILE -pubout",
}
_BEATEN = re.compile(r"(?P<path>.+)\.[0-9a-f]{12}", re.DOTALL)


class UnsignedError(UserError):
    """The model has no valid signature for the configured key."""


def sign(folder: Path, fields: Mapping[str, Any]) -> bool:
    """If a private key is configured, sign all files below `folder` and return true.

    `fields` are the manifest fields that the files are published with. Raises `ConfigError` if the
    key is unusable, or the extra `signing` is not installed.
    """
    signature = folder / SIGNATURE
    # Remove an earlier signature, which covers the original files.
    signature.unlink(missing_ok=True)
    (folder / FIELDS).unlink(missing_ok=True)
    key = _key(PRIVATE_KEY)
    if key is None:
        return False
    config = _usable(PRIVATE_KEY, key)
    (folder / FIELDS).write_text(_text(fields), encoding="utf-8")
    config.set_hashing_config(_hashing()).sign(folder, signature)
    return True


def verifies() -> bool:
    """Return whether a public key is configured, so that signatures must be verified."""
    return _key(PUBLIC_KEY) is not None


def verify(uri: str, scratch: Path | None = None) -> Manifest:
    """Verify a published model as a server would load it, and return its manifest.

    The model must have exactly the files in its manifest, undamaged, and a valid signature if a
    public key is configured. `scratch` is the local folder for a temporary copy.

    Raises:
        Corrupt: a file is damaged, or is not in the manifest.
        UnsignedError: the signature is missing, made with another key, or does not match the files.
        ConfigError: the key is unusable, or the extra `signing` is not installed.
        UserError: the model cannot be read.
    """
    manifest = storage.verify(uri)
    _refuse_unnamed(uri, manifest)
    if verifies():
        with tempfile.TemporaryDirectory(dir=scratch, prefix="signed-") as name:
            storage.fetch(uri, Path(name) / "model", manifest=manifest)
            verify_fetched(Path(name) / "model", manifest.fields, uri)
    return manifest


def fetch(uri: str, folder: Path, manifest: Manifest, only: Callable[[str], bool]) -> None:
    """Download the files of a model for which `only` returns true, and verify the model.

    If a public key is configured, all files are downloaded, because a signature covers all of them.
    Raises the errors of `verify`.
    """
    if verifies():
        _refuse_unnamed(uri, manifest)
    else:
        _refuse_other_versions(uri, manifest)
    storage.fetch(uri, folder, only=lambda path: verifies() or only(path), manifest=manifest)
    verify_fetched(folder, manifest.fields, uri)


def _refuse_other_versions(uri: str, manifest: Manifest) -> None:
    """Raise `Corrupt` unless a server would load the SavedModel that the manifest names.

    A server loads the highest version number in the folder that it watches, regardless of the
    manifest.
    """
    place = manifest.fields.get("saved_model")
    if not isinstance(place, str) or not any(_is_below(each, place) for each in manifest.files):
        raise Corrupt(f"{uri}: the manifest lists no SavedModel; export the model again")
    above, _, number = place.rpartition("/")
    if not above:
        return
    served = [each for each in manifest.files if _is_below(each, above)]
    there = {each.path.removeprefix(f"{above}/").partition("/")[0] for each in served}
    for other in sorted({*there, *storage.names(storage.join(uri, above))} - {number}):
        raise _unnamed_error(uri, f"{above}/{other}")
    for each in served:
        if each.stored_at != each.path:
            raise Corrupt(
                f"{uri}: {each.path} is not where a server reads it; export the model again"
            )


def _is_below(entry: FileEntry, folder: str) -> bool:
    return entry.path.startswith(f"{folder}/")


def _refuse_unnamed(uri: str, manifest: Manifest) -> None:
    """Raise `Corrupt` if a model has a file that is not in its manifest."""
    _refuse_other_versions(uri, manifest)
    named = {MANIFEST, *(entry.stored_at for entry in manifest.files)}
    with report_errors(f"list {uri}"):
        there = [file.path for file in choose_store(uri).files(uri)]
    served = str(manifest.fields["saved_model"]).partition("/")[0]
    for path in sorted(set(there) - named):
        # Skip files that a failed publication has left, because readers and servers ignore them.
        beaten = _BEATEN.fullmatch(path)
        if not beaten or beaten["path"] not in named or path.startswith(f"{served}/"):
            raise _unnamed_error(uri, path)


def _unnamed_error(uri: str, path: str) -> Corrupt:
    return Corrupt(
        f"{uri} contains {path}, which the manifest does not list: a server could load this file "
        "unverified; remove the file"
    )


def verify_fetched(folder: Path, fields: Mapping[str, Any], where: str) -> bool:
    """Verify the signature of a local copy of a model. Return false if no public key is configured.

    `folder` has all files of the model except `MANIFEST.json`, which has these `fields`. `where` is
    the location of the model, for error messages.
    """
    key = _key(PUBLIC_KEY)
    if key is None:
        return False
    config = _usable(PUBLIC_KEY, key)
    _verify_files(config, folder, where)
    signed = folder / FIELDS
    if not signed.is_file() or signed.read_text(encoding="utf-8") != _text(fields):
        raise UnsignedError(
            f"{where}: the manifest is not signed, although the signature of the files is "
            f"valid for the key of {PUBLIC_KEY}; do not use this model, but export it again"
        )
    return True


def check() -> list[str]:
    """Return a line for each configured key. Raises `ConfigError` if one is unusable."""
    found = []
    for variable in (PRIVATE_KEY, PUBLIC_KEY):
        key = _key(variable)
        if key is not None:
            _usable(variable, key)
            found.append(f"{variable} names a valid key")
    return found


def _verify_files(config: Any, folder: Path, where: str) -> None:
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise UnsignedError(
            f"{where} is not signed, but {PUBLIC_KEY} is set; export the model again with "
            f"{PRIVATE_KEY}, or unset {PUBLIC_KEY}"
        )
    try:
        config.set_hashing_config(_hashing()).verify(folder, signature)
    # Verifying an invalid bundle may raise any exception.
    except Exception as error:
        why = (
            " ".join(str(error).split())
            or "it was made with another key, or the files were changed"
        )
        raise UnsignedError(
            f"{where}: the signature is not valid for the key of {PUBLIC_KEY}: {why}; do not use "
            "this model, but export it again"
        ) from None


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _key(variable: str) -> Path | None:
    text = os.environ.get(variable, "")
    return Path(text) if text else None


def _usable(variable: str, key: Path) -> Any:
    """Return the signing configuration for a key. Raises `ConfigError` if it is unusable."""
    package = _package()
    try:
        if variable == PRIVATE_KEY:
            return package.signing.Config().use_elliptic_key_signer(private_key=key)
        return package.verifying.Config().use_elliptic_key_verifier(public_key=key)
    except OSError as error:
        raise ConfigError(f"{variable}: cannot read {key}: {error.strerror}") from None
    # Hide the library's message, because it may contain the key.
    except Exception:
        kind = "private" if variable == PRIVATE_KEY else "public"
        raise ConfigError(
            f"{variable}: {key} is not a {kind} elliptic-curve key in PEM format without a "
            f"password; create one with `{_CREATE[kind]}`"
        ) from None


def _hashing() -> Any:
    # Exclude the signature, and the manifest, which is written later and lists the signature.
    paths = [SIGNATURE, MANIFEST]
    config = _package().hashing.Config()
    return config.set_ignored_paths(paths=paths, ignore_git_paths=False)


def _package() -> Any:
    try:
        import model_signing  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"{PRIVATE_KEY} and {PUBLIC_KEY} need the extra `signing`: "
            "run pip install 'kfp-flotilla[signing]'"
        ) from None
    return model_signing


def write_provenance(folder: Path, name: str, lineage: Mapping[str, Any], created: str) -> None:
    """Write the provenance statement about all files below `folder`, a version of a model.

    `lineage` is in the version's manifest. `created` is when the exported model was published.
    """
    (folder / PROVENANCE).unlink(missing_ok=True)
    tree = _statement(_subjects(folder), name, lineage, created)
    text = json.dumps(tree, indent=2, ensure_ascii=False)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def _statement(
    subjects: list[dict[str, Any]], name: str, lineage: Mapping[str, Any], created: str
) -> dict[str, Any]:
    """Return the provenance statement. If the lineage lacks a field, omit it or leave it empty."""
    config = {"name": name, "configuration": lineage.get("config", "")}
    return {
        "_type": STATEMENT,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": config,
                "internalParameters": {"image": lineage.get("image", "")},
                "resolvedDependencies": list(_dependencies(lineage)),
            },
            "runDetails": {
                "builder": {"id": BUILD, "version": {"flotilla": version("kfp-flotilla")}},
                "metadata": {"invocationId": str(lineage.get("run_id", "")), "finishedOn": created},
            },
        },
    }


def _dependencies(lineage: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("dataset", "checkpoint", "warmed_from", "code", "evaluation", "decision"):
        if uri := str(lineage.get(key) or ""):
            found: dict[str, Any] = {"name": key, "uri": uri}
            if key == "dataset" and lineage.get("fingerprint"):
                found["digest"] = {"sha256": str(lineage["fingerprint"])}
            yield found
    commit, _, dirty = str(lineage.get("commit") or "").partition("-")
    if len(commit) == _COMMIT_DIGITS:
        found = {"name": "flotilla", "digest": {"gitCommit": commit}}
        yield {**found, "annotations": {"changed": True}} if dirty else found
    if image := str(lineage.get("image") or ""):
        digest = image.partition("@sha256:")[2]
        yield {"name": "image", "uri": image, **({"digest": {"sha256": digest}} if digest else {})}


def _subjects(folder: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {"name": path.relative_to(folder).as_posix(), "digest": {"sha256": _sha256(path)}}
        for path in files
        if path.name not in {FIELDS, SIGNATURE}
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
