"""Put the bundle of a run on the path of this process, and of those that it starts."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from trainer import storage, user_code
from trainer.code.bundle import digest_of
from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError


def configured(text: str) -> Config:
    """Return the configuration of a step, whose bundle is on the path now; raises `UserError`."""
    config = Config.model_validate_json(text)
    enter(config.code)
    return config


def enter(uri: str) -> None:
    """Let this process and its children find the user's modules in a bundle, if there is one.

    Raises `UserError` where it is not what was published.
    """
    if not uri:
        return
    digest = storage.name_of(uri)
    folder = _scratch() / digest
    try:
        manifest = storage.fetch(uri, folder)
    except storage.NotPublished:
        raise ConfigError(
            f"code: there is no bundle at {uri}: it was deleted, or this place cannot see it; "
            "submit again with --code"
        ) from None
    hashes = {each.path: _hash(folder / each.path) for each in manifest.files}
    if digest_of(hashes) != digest:
        # The next process fetches it anew.
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"code: {uri} was changed after it was published: its content is not that of its "
            "digest; delete it, and submit again with --code"
        )
    os.environ.update({user_code.FOLDER_VARIABLE: str(folder), user_code.BUNDLE_VARIABLE: uri})


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"code: cannot read {path}: {error.strerror}") from None


def _scratch() -> Path:
    """Return a folder that no other user can write to."""
    folder = Path(tempfile.gettempdir(), f"flotilla-code-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_ours and not status.st_mode & 0o022:
            return folder
        return Path(tempfile.mkdtemp(prefix="flotilla-code-"))
    except OSError as error:
        raise UserError(
            f"cannot write below {folder.parent}: {error.strerror}; free some space, or set TMPDIR"
        ) from None
