"""A model that ends the process, as code that was a script once does."""

import sys
from typing import NoReturn


def model(*_arguments: object, **_named: object) -> NoReturn:
    sys.exit(0)
