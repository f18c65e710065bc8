"""Signs the files of an exported model, and verifies what is signed, with OpenSSF model signing.

`model.sig` is a Sigstore bundle over the names and SHA-256 of all other files, made with a private
key on an elliptic curve; no service is asked. The keys are files that two variables name, so that
no configuration, record or log ever holds one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.errors import ConfigError, UserError

SIGNATURE = "model.sig"
PRIVATE_KEY = "FLOTILLA_SIGNING_KEY"
PUBLIC_KEY = "FLOTILLA_VERIFYING_KEY"


class UnsignedError(UserError):
    """A model has no valid signature by the key that is configured."""


def sign(folder: Path) -> bool:
    """Sign all files below `folder` where a private key is configured; return whether it was.

    Raises:
        ConfigError: the key cannot be used, or the extra `signing` is not installed.
    """
    signature = folder / SIGNATURE
    # Of what was copied: the files have changed.
    signature.unlink(missing_ok=True)
    key = _key(PRIVATE_KEY)
    if key is None:
        return False
    config = _usable(PRIVATE_KEY, key)
    config.set_hashing_config(_hashing()).sign(folder, signature)
    return True


def verify(model: str | Path, scratch: Path | None = None) -> bool:
    """Verify a model where a public key is configured; return whether it was verified.

    Args:
        model: URI of a published model, or a folder with all of its files.
        scratch: local folder for the files of a URI; a temporary one when left out.

    Raises:
        UnsignedError: there is no signature, it is by another key, or a file differs.
        ConfigError: the key cannot be used, or the extra `signing` is not installed.
        UserError: the model cannot be read.
    """
    key = _key(PUBLIC_KEY)
    if key is None:
        return False
    config = _usable(PUBLIC_KEY, key)
    if isinstance(model, Path):
        _verify_folder(config, model, str(model))
        return True
    with tempfile.TemporaryDirectory(dir=scratch, prefix="signed-") as name:
        folder = Path(name) / "model"
        storage.fetch(model, folder)
        _verify_folder(config, folder, model)
    return True


def check() -> list[str]:
    """Return a line for each key that is configured and can be used; raises `ConfigError`."""
    found = []
    for variable in (PRIVATE_KEY, PUBLIC_KEY):
        key = _key(variable)
        if key is not None:
            _usable(variable, key)
            found.append(f"{variable} names a key")
    return found


def _verify_folder(config: Any, folder: Path, where: str) -> None:
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise UnsignedError(
            f"{where} is not signed, and {PUBLIC_KEY} is set: sign it by running its export again "
            f"with {PRIVATE_KEY}, or unset {PUBLIC_KEY}"
        )
    try:
        config.set_hashing_config(_hashing()).verify(folder, signature)
    # A foreign bundle may fail in any way.
    except Exception as error:
        why = " ".join(str(error).split()) or "it is by another key, or was changed"
        raise UnsignedError(
            f"{where}: the signature is not valid for the key of {PUBLIC_KEY}: {why}; do not use "
            "this model, export it again"
        ) from None


def _key(variable: str) -> Path | None:
    text = os.environ.get(variable, "")
    return Path(text) if text else None


def _usable(variable: str, key: Path) -> Any:
    """Return the configuration of a signature with this key; raises `ConfigError`."""
    package = _package()
    try:
        if variable == PRIVATE_KEY:
            return package.signing.Config().use_elliptic_key_signer(private_key=key)
        return package.verifying.Config().use_elliptic_key_verifier(public_key=key)
    except OSError as error:
        raise ConfigError(f"{variable}: cannot read {key}: {error.strerror}") from None
    # Words of a library about a key are not repeated.
    except Exception:
        kind = "private" if variable == PRIVATE_KEY else "public"
        raise ConfigError(
            f"{variable}: {key} is no {kind} key on an elliptic curve, in PEM and without a "
            "password: make one with `openssl ecparam -name prime256v1 -genkey`"
        ) from None


def _hashing() -> Any:
    # The manifest names the signature, so that it is written after it.
    paths = [SIGNATURE, "MANIFEST.json"]
    config = _package().hashing.Config()
    return config.set_ignored_paths(paths=paths, ignore_git_paths=False)


def _package() -> Any:
    try:
        import model_signing  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"{PRIVATE_KEY} and {PUBLIC_KEY} need the extra `signing`: "
            "pip install 'flotilla[signing]'"
        ) from None
    return model_signing
