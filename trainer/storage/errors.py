"""Storage errors, each reported as one line with a suggested fix."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from flotilla.trainer.runtime.errors import TransientError, UserError

_REMEDIES = {
    errno.ENOSPC: "free some space, or set storage.root to a location with more",
    errno.EDQUOT: "free some space, or set storage.root to a location with more",
    errno.EFBIG: "raise the file size limit (ulimit -f), or use another file system",
    errno.EACCES: "make it accessible to this user, or choose another location",
    errno.EPERM: "make it accessible to this user, or choose another location",
    errno.EROFS: "choose a writable location",
    errno.ENOTDIR: "there is a file where a folder is expected; move it away",
    errno.EEXIST: "there is a file where a folder is expected; move it away",
    errno.EISDIR: "there is a folder where a file is expected; move it away",
    errno.ENAMETOOLONG: "use shorter names",
}
# Error numbers from a network file system while its server or the network is down.
PASSING = frozenset({errno.ECONNRESET, errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT})


# These class names do not end in `Error`, because callers qualify them: `storage.Corrupt`.


class Missing(UserError):  # noqa: N818
    """Nothing exists at the URI."""


class NotPublished(Missing):
    """There is no manifest at the URI."""


class Corrupt(UserError):  # noqa: N818
    """A stored file is damaged or has an unexpected format. The message names the file."""


class UnknownSchema(UserError):  # noqa: N818
    """The manifest has a layout that this version does not support."""


class Conflict(UserError):  # noqa: N818
    """Different content is already published at the URI."""


class Unavailable(TransientError):  # noqa: N818
    """The store was unavailable until the deadline of the operation."""


class StoreError(OSError):
    """A request to an object store failed. `trouble` names a `store.Trouble`, or is empty."""

    trouble = ""


class StoreUnavailable(StoreError):  # noqa: N818
    """An object store was unavailable until the deadline."""


@contextmanager
def report_errors(action: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Convert `StoreUnavailable` to `Unavailable`, and any other `OSError` to the class `kind`."""
    try:
        yield
    except StoreUnavailable as error:
        raise Unavailable(f"cannot {action}: {error}") from error
    except OSError as error:
        raise kind(f"cannot {action}: {_reason(error)}") from error


@contextmanager
def check_form(where: str) -> Iterator[None]:
    """Raise `Corrupt` if the block fails because a record has unexpected fields or types.

    The checksum may be valid, because another version or program may have written the record.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Corrupt(
            f"{where} is not in the format that this version reads ({why}); create it again"
        ) from error


def _reason(error: OSError) -> str:
    if isinstance(error, StoreError):
        return str(error)
    # For a rename, report the destination, because the staging folder no longer exists.
    name = error.filename2 or error.filename
    where = f"{os.fsdecode(name)}: " if isinstance(name, str | bytes) else ""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{what}" + (f"; {remedy}" if remedy else "")
