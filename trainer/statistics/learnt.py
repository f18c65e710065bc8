"""What a model learns from the statistics of its training data; nothing is read until it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from trainer.statistics import statistics
from trainer.statistics.statistics import FeatureStatistics

# Gives the content of `statistics.json`, empty where there is none yet, and where it is from.
Read = Callable[[], tuple[bytes, str]]


class Learnt:
    """The statistics of the training split, as a model asks for them."""

    def __init__(self, read: Read) -> None:
        """Read them with `read`, once, when they are asked for."""
        self._read = read
        #: The content of `statistics.json` where it was asked for: what a checkpoint has to keep.
        self.data = b""

    @cached_property
    def features(self) -> Mapping[str, FeatureStatistics]:
        """The statistics of each feature.

        Raises:
            UserError: they cannot be read.
        """
        data, uri = self._read()
        if not data:
            return {}
        found = statistics.from_bytes(data, uri).splits["train"].features
        self.data = data
        return found


#: Before any data is prepared nothing is known of any feature.
NOTHING = Learnt(lambda: (b"", ""))
