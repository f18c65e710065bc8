"""A folder of this machine for the time of a step."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Lend a folder; where it is full the step has failed, and not its code."""
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = tempfile.gettempdir()
        raise UserError(
            f"cannot write below {where}: {error.strerror}; free some space, or set TMPDIR"
        ) from error
