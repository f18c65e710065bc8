"""The message of a refused call."""

from collections.abc import Callable
from typing import Any

import pytest

from flotilla.trainer.runtime.errors import ConfigError


def refusal(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """Return the message, which must be one line, of the `ConfigError` that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **named)
    message = str(caught.value)
    assert "\n" not in message
    return message
