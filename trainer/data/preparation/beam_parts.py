"""Map the parts of a source by Apache Beam: its workers publish them, and they are fetched here.

A worker needs this package, and where `data.map` or a builder of your own is used that module too,
which it fetches where the run has a bundle of code.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apache_beam as beam

from trainer import storage, user_code
from trainer.code import delivery
from trainer.config.data import DataConfig
from trainer.data.preparation.parts import map_part
from trainer.data.preparation.pipeline_options import pipeline_options
from trainer.data.source import Part, Source
from trainer.errors import TransientError, UserError

# Beam has no types for these.
_Create: Any = beam.Create
_Reshuffle: Any = beam.Reshuffle
_Map: Any = beam.Map
_FAILED = "failed part"
_SUFFIX = ".failed"


def map_parts_by_beam(
    source: Source, parts: Sequence[Part], folder: Path, *, config: DataConfig, uri: str
) -> None:
    """Map parts by a pipeline that publishes each below `uri`; fetch them into `folder`.

    Raises:
        UserError: a part cannot be read, or the pipeline failed.
    """
    for name in storage.names(uri):
        if name.endswith(_SUFFIX):
            storage.delete(storage.join(uri, name))
    if parts:
        work = PartMapper(pickle.dumps(source), uri, config.vocabulary)
        try:
            options = pipeline_options(config.runner)
            with _quiet(), beam.Pipeline(options=options) as pipeline:
                # What is created is one bundle otherwise, which one worker takes.
                made = pipeline | _Create(list(parts), reshuffle=False) | _Reshuffle()
                _ = made | "map" >> _Map(work)
        # A runner raises whatever it likes.
        except Exception as error:
            _raise_failure(uri)
            raise UserError(
                f"data.runner: the Beam pipeline failed: {user_code.line_of(error)}; finished "
                "parts are kept"
            ) from error
    for part in parts:
        storage.fetch(storage.join(uri, part.folder), folder / part.folder)


class PartMapper:
    """Maps one part, and publishes it; what a worker runs."""

    def __init__(self, source: bytes, uri: str, vocabulary: int) -> None:
        """Take a pickled source."""
        self._source, self._uri, self._vocabulary = source, uri, vocabulary
        # A worker on another machine has none of the user's modules.
        self._code = user_code.bundle()
        self._opened: tuple[Source, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a worker opens."""
        return {**vars(self), "_opened": None}

    def __call__(self, part: Part) -> int:
        """Return the number of the part.

        Why it is not mapped is published as well: a runner hands on the text of an error alone.
        """
        uri = storage.join(self._uri, part.folder)
        with tempfile.TemporaryDirectory(prefix="part-") as name:
            place = Path(name) / part.folder
            try:
                if self._opened is None:
                    delivery.enter(self._code)
                    source = pickle.loads(self._source)
                    self._opened = source, source.select()
                map_part(*self._opened, part, place, vocabulary=self._vocabulary)
                storage.publish(place, uri, kind="part")
            except TransientError:
                raise
            except UserError as error:
                empty, fields = Path(name) / "empty", {"message": str(error)}
                empty.mkdir()
                with suppress(UserError):
                    storage.publish(empty, f"{uri}{_SUFFIX}", kind=_FAILED, fields=fields)
                raise
        return part.number


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Beam says of its channels, and its traceback of an error that is raised."""
    levels = {"apache_beam": logging.WARNING, "apache_beam.runners.common": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _raise_failure(uri: str) -> None:
    failures = storage.published(uri, _FAILED)
    for place, _ in failures:
        storage.delete(place)
    if failures:
        raise UserError(failures[0][1].fields["message"])
