"""A model that ends the process, as code that was a script once does."""

from __future__ import annotations

import sys
from typing import NoReturn


def model(*_arguments: object, **_named: object) -> NoReturn:
    sys.exit(0)
