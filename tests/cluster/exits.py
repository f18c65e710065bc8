"""A model that ends the process, as code from a script may do."""

import sys
from typing import NoReturn


def model(*_arguments: object, **_named: object) -> NoReturn:
    sys.exit(0)
