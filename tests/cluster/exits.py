"""A model whose construction ends the process, as a user's script may do."""

import sys
from typing import NoReturn


def model(*_arguments: object, **_named: object) -> NoReturn:
    sys.exit(0)
