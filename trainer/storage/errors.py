"""What storage says when something is missing, wrong, or cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "free some space, or set storage.root to a place with more",
    errno.EDQUOT: "free some space, or set storage.root to a place with more",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or use another file system",
    errno.EACCES: "make it accessible to this user, or choose another place",
    errno.EPERM: "make it accessible to this user, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away",
    errno.EEXIST: "a file stands where a folder is needed; move it away",
    errno.EISDIR: "a folder stands where a file is needed; move it away",
    errno.ENAMETOOLONG: "use shorter names",
}


# Used with the package's name before them, where `storage.Corrupt` reads as a sentence does.


class Missing(UserError):  # noqa: N818
    """There is nothing at a URI."""


class NotPublished(Missing):
    """There is no manifest at a URI."""


class Corrupt(UserError):  # noqa: N818
    """What is stored is not what was published; the message names the file."""


class UnknownSchema(UserError):  # noqa: N818
    """The manifest was written by a version with another layout."""


class Conflict(UserError):  # noqa: N818
    """Something else is published at the URI already."""


class Unavailable(UserError):  # noqa: N818
    """The store did not answer, or not as it should, until the deadline of the operation."""


class Refusal(OSError):  # noqa: N818
    """A store that is not a file system has refused; the message names reason and remedy.

    Attributes:
        trouble: a name of `bucket.Trouble`; empty where nobody asked the store what it means.
    """

    trouble = ""


class Silence(Refusal):
    """A store was not available until the deadline."""


@contextmanager
def reported(action: str) -> Iterator[None]:
    """Turn an `OSError` into a `UserError`: "cannot ACTION: PATH: reason; remedy"."""
    try:
        yield
    except Silence as error:
        raise Unavailable(f"cannot {action}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot {action}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    if isinstance(error, Refusal):
        return str(error)
    # Of a rename, the second name is the place that was asked for; the first is hidden and gone.
    name = error.filename2 or error.filename
    where = f"{os.fsdecode(name)}: " if isinstance(name, str | bytes) else ""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{what}" + (f"; {remedy}" if remedy else "")
