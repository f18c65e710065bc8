"""Find a dataset's builder, read it as a source, and speed up its encoding of images.

A builder is embedded, from TFDS, or a user's `package.module:Builder`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray
from tensorflow_datasets.core.dataset_builder import FileReaderBuilder

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import features
from flotilla.trainer.data.builders.download import download
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.preparation.runners import pipeline_options
from flotilla.trainer.data.source import Batch, Part, Source
from flotilla.trainer.data.splits import plan
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, nearest

# Store names instead of classes, so that the module is imported only when a builder is used.
_HERE = "flotilla.trainer.data.builders.embedded"
EMBEDDED = {
    "brackets": f"{_HERE}:Brackets",
    "breast_cancer": f"{_HERE}:BreastCancer",
    "clicks": f"{_HERE}:Clicks",
    "diabetes": f"{_HERE}:Diabetes",
    "digit_properties": f"{_HERE}:DigitProperties",
    "digits": f"{_HERE}:Digits",
    "linnerud": f"{_HERE}:Linnerud",
    "wine": f"{_HERE}:Wine",
}
# Datasets that are no longer embedded, with advice on what to use instead.
_MOVED = {
    "clicks_large": "moved to the examples in 0.2; use clicks_large:ClicksLarge "
    "with --code examples/clicks_large of the source code"
}


def builder(config: DataConfig, data_dir: Path) -> tfds.core.DatasetBuilder:
    """Return the TFDS builder of `config.dataset`, by default in its newest version.

    A name may include a TFDS config, such as `glue/cola`. TFDS stores its downloads and prepared
    files in `data_dir`. `data.builder_args` are passed to the builder. Raises `ConfigError` if the
    dataset, its config or its version does not exist, or the builder rejects its arguments.
    """
    if remedy := _MOVED.get(config.dataset):
        raise ConfigError(f"data.dataset: {config.dataset} {remedy}")
    name = EMBEDDED.get(config.dataset, config.dataset)
    make = _own_class(name) if ":" in name else partial(tfds.builder, name)
    version = {"version": config.version} if config.version else {}
    given: dict[str, Any] = {} if _reads_a_folder(make) else {"data_dir": data_dir, **version}
    try:
        found = make(**given, **config.builder_args)
        if config.version and is_folder(found) and str(found.version) != config.version:
            one, asked = str(found.version), f"data.version: {config.version}: {config.dataset}"
            raise ConfigError(f"{asked} has only version {one}; set data.version to {one!r}")
        return found
    except tfds.core.DatasetNotFoundError as error:
        known = [*EMBEDDED, *tfds.list_builders(with_community_datasets=False)]
        raise ConfigError(
            f"data.dataset: TFDS has no dataset {name!r}{nearest(name, known)}; to use your own "
            "builder, set data.dataset to package.module:Builder"
        ) from error
    except ConfigError:
        raise
    # Catch everything, because a constructor may raise any exception for a wrong argument.
    except Exception as error:
        raise ConfigError(_refusal(config, error)) from error


def is_folder(found: tfds.core.DatasetBuilder) -> bool:
    """Return whether a builder reads a folder in place, as `tfds.ImageFolder` does."""
    return _reads_a_folder(type(found))


def is_drawn(found: tfds.core.DatasetBuilder) -> bool:
    """Return whether a builder can generate any range of a split (it has `sizes` and `columns`)."""
    return hasattr(found, "sizes") and hasattr(found, "columns")


def content(found: tfds.core.DatasetBuilder) -> dict[str, str]:
    """Return a digest of the folder that a builder reads in place, or {} for other builders."""
    if not is_folder(found):
        return {}
    folder = Path(found.data_dir)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = ((str(path.relative_to(folder)), path.stat()) for path in files)
    lines = [f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats]
    return {"folder": hashlib.sha256("".join(lines).encode()).hexdigest()}


def _reads_a_folder(make: Any) -> bool:
    if not isinstance(make, type) or issubclass(make, FileReaderBuilder):
        return False
    taken = inspect.signature(make).parameters.values()
    return all(each.name != "data_dir" and each.kind != each.VAR_KEYWORD for each in taken)


def _own_class(name: str) -> type[Any]:
    module, _, attribute = name.partition(":")
    if attribute[:1].isdigit():
        raise ConfigError(
            f"data.dataset: {name!r} names a version; set data.dataset to {module!r} and "
            f"data.version to {attribute!r}"
        )
    loaded = user_code.import_named("data.dataset", module)
    found = getattr(loaded, attribute, None)
    if not (isinstance(found, type) and issubclass(found, tfds.core.DatasetBuilder)):
        hint = nearest(attribute, [word for word in vars(loaded) if not word.startswith("_")])
        raise ConfigError(
            f"data.dataset: {module} has no TFDS builder (tfds.core.DatasetBuilder) called "
            f"{attribute!r}{hint}"
        )
    return found


def _refusal(config: DataConfig, error: Exception) -> str:
    # Remove the prefix that TFDS adds to the builder's message.
    reason = re.sub(r"^Failed to construct dataset .*?}\": ", "", user_code.short_message(error))
    base, _, chosen = config.dataset.partition("/")
    if "BuilderConfig" in reason and chosen:
        known = list(tfds.builder_cls(base).builder_configs)
        hint = nearest(chosen, known) or f" (one of {', '.join(known[:20])})"
        return f"data.dataset: {base} has no config {chosen!r}{hint}"
    key = "data.version" if config.version and "ersion" in reason else "data.dataset"
    if config.builder_args and isinstance(error, TypeError):
        key = "data.builder_args"
    value = config.version if key == "data.version" else config.dataset
    place = user_code.find_place(error)
    return f"{key}: {value}: {type(error).__name__}: {reason}{f' ({place})' if place else ''}"


PART_BYTES = 64 << 20


class BuilderSource(Source):
    """The dataset named by `data.dataset`. TFDS stores its files in `data_dir`."""

    def __init__(self, config: DataConfig, data_dir: Path) -> None:
        """Find the builder. Raises `ConfigError`."""
        self._config = config
        self._data_dir = data_dir
        self.name = config.dataset
        self.identity = {"version": str(self._builder.version)} | content(self._builder)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the builder from the pickle. Each process creates it from the configuration."""
        return {name: value for name, value in vars(self).items() if name != "_builder"}

    @cached_property
    def _builder(self) -> Any:
        return builder(self._config, self._data_dir)

    def select(self) -> Selection:
        """Return the selected features, from the builder's metadata."""
        return features.select(self._config, self._builder.info)

    def fetch(self) -> None:
        """Download and prepare the dataset. Raises `UserError`."""
        quicken(self.select().connectors.values())
        if is_folder(self._builder) or is_drawn(self._builder):
            return
        runner = self._config.runner
        is_beam = isinstance(self._builder, tfds.core.BeamBasedBuilder)
        options = pipeline_options(runner) if is_beam or runner.name == "beam" else None
        download(self.name, self._builder, self._config.manual_dir, beam_options=options)

    def parts(self) -> Sequence[Part]:
        """Return the parts. Each part is a range of a split."""
        selection = self.select()
        size = max(1, PART_BYTES // max(1, selection.example_bytes))
        ranges = [
            (origin, first, min(first + size, len(targets)))
            for origin, targets in self._plan().items()
            for first in range(0, len(targets), size)
        ]
        return [
            Part(number=number, origin=origin, where={"first": first, "end": end})
            for number, (origin, first, end) in enumerate(ranges)
        ]

    @property
    def total(self) -> int:
        """The number of examples in the splits that are used."""
        return sum(map(len, self._plan().values()))

    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the examples of a part."""
        splits = self._plan()[part.origin]
        at = part.where["first"]
        for columns in self._batches(selection, part):
            # Count the values of any column, because examples for `data.map` have no targets.
            count = len(next(iter(columns.values())))
            yield Batch(columns=columns, splits=splits[at : at + count])
            at += count

    def _batches(self, selection: Selection, part: Part) -> Iterator[dict[str, Any]]:
        if is_drawn(self._builder):
            for columns in self._builder.columns(
                part.origin, part.where["first"], part.where["end"]
            ):
                yield {name: columns[name] for name in selection.specs}
            return
        from flotilla.trainer.data.builders.batches import batches  # noqa: PLC0415

        yield from batches(self.name, self._builder, selection, part)

    def _plan(self) -> dict[str, NDArray[np.int8]]:
        if is_drawn(self._builder):
            sizes = dict(self._builder.sizes)
        else:
            sizes = {name: split.num_examples for name, split in self._builder.info.splits.items()}
        config = self._config
        return plan(self.name, sizes, validation=config.validation, seed=config.seed)


def quicken(connectors: Iterable[Any]) -> None:
    """Make TFDS image features encode uint8 arrays by `encode_png`.

    TFDS would call TensorFlow for each image. It still encodes other values.
    """
    # Import the module only here, because it loads TensorFlow.
    from flotilla.trainer.data import images  # noqa: PLC0415

    for connector in connectors:
        # Compare exact types, because a subclass may encode in another way.
        if (
            type(connector) is tfds.features.Image
            and connector.encoding_format in {None, "png"}
            and connector.np_dtype == np.uint8
            and len(connector.shape) == len(("height", "width", "channels"))
            and connector.shape[-1] in images.MODES
            and None not in connector.shape
        ):
            theirs, shape = connector.encode_example, connector.shape
            connector.encode_example = partial(_encode, theirs, images.encode_png, shape)


def _encode(theirs: Any, encode: Any, shape: tuple[int, ...], value: Any) -> Any:
    is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8
    return theirs(encode(value) if is_bytes and value.shape == shape else value)
