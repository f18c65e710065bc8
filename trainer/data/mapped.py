"""`data.map`: a user's function that converts examples of a source to examples of the dataset.

The function takes an example, which is a dict of values by name. It returns the converted example,
or None to leave the example out. If its attribute `batched` is true, the function takes and returns
arrays of several examples, and must return as many examples as it was given. Strings are `str`,
encoded images are bytes, and other values are numbers or NumPy arrays.

The features of the result are inferred from the first examples. Later examples must match.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from numpy.typing import NDArray

from flotilla.trainer.config.data import NUMBERS_IN_WRITING, DataConfig, ImageConfig
from flotilla.trainer.data import images
from flotilla.trainer.data.builders.batches import fit_value
from flotilla.trainer.data.columns import make_column, make_rows, numpy_type
from flotilla.trainer.data.features import DEFAULT_LABEL, Fit, Leaf, Selection, choose
from flotilla.trainer.data.source import Batch, Part, Source
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError

# Number of examples from which the features of the result are inferred.
FIRST = 256
Value = NDArray[Any]
Example = dict[str, Value]
_TEXT = np.dtype(object)
_CAST: dict[str, np.dtype[Any]] = {
    "int": np.dtype(np.int64),
    "float": np.dtype(np.float32),
    **dict.fromkeys(NUMBERS_IN_WRITING, np.dtype(np.float32)),
    "bool": np.dtype(bool),
}


class UnsuitableError(ValueError):
    """An example cannot be stored. The caller adds the name of the function to the message."""


def source_config(config: DataConfig) -> DataConfig:
    """Return the configuration for reading the source. It omits the roles and shapes of results."""
    of_result = {"inputs": (), "label": (), "weight": "", "group": "", "shapes": {}, "buckets": ()}
    return config.model_copy(update=of_result)


class _Row(NamedTuple):
    """A result of the function, and the index of its example in the part."""

    part: Part
    number: int
    example: Example


class MappedSource(Source):
    """The examples of another source, converted by the user's function."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        """Wrap `source`, which must have been created with `source_config(config)`."""
        self.name = f"data.map: {config.map}"
        # Omit the function, because the dataset's key already includes a digest of its code.
        self.identity: Mapping[str, Any] = source.identity
        self._source = source
        self._config = config
        self._selection: Selection | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the source's selection, because TFDS features cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_given"}

    @cached_property
    def _given(self) -> Selection:
        return self._source.select()

    def select(self) -> Selection:
        """Return the features of the function's results, inferred from the first examples.

        This fetches the source, and reads all of it if the classes of a feature have to be
        collected. The result is cached, and pickled with the source.
        """
        if self._selection is None:
            self._selection = self._infer()
        return self._selection

    def _infer(self) -> Selection:
        self._source.fetch()
        parts = self._source.parts()
        every = (row for part in parts for _, rows in self._map(part) for row in rows)
        first = list(itertools.islice(every, FIRST))
        if not first:
            raise UserError(
                f"{self.name} returns None for every row, so no example is left; return a dict for "
                "each row to keep"
            )
        names = list(first[0].example)
        for row in first:
            if wrong := sorted(row.example.keys() ^ set(names)):
                self._refuse(row, f"{'no' if wrong[0] in names else 'a'} {wrong[0]!r}")
        if unknown := sorted(self._config.types.keys() - {*names, *self._given.specs}):
            raise ConfigError(
                f"data.types: {unknown[0]!r} is neither in {self._source.name} nor in the results "
                f"of {self.name}; remove it"
            )
        classes = self._classes(first)
        leaves = {name: self._leaf(name, first, classes.get(name)) for name in names}
        return choose(self._config, self.name, leaves)

    def parts(self) -> Sequence[Part]:
        """Return the parts of the source."""
        return self._source.parts()

    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the results. Raises `UserError` if the function fails or a result is unsuitable."""
        of_lengths = {length_name(name) for name, spec in selection.specs.items() if spec.varies}
        before = 0
        for batch, rows in self._map(part):
            places = [row.number - before for row in rows]
            before += len(batch.splits)
            columns: dict[str, Any] = {}
            for name, spec in selection.specs.items() if rows else ():
                if name not in of_lengths:
                    values = [self._store(row, name, selection) for row in rows]
                    is_list = spec.stored == "image" or spec.varies
                    columns[name] = make_column(spec, values if is_list else np.stack(values))
            if columns:
                yield Batch(columns=columns, splits=batch.splits[places])

    def place(self, part: Part, number: int) -> str:
        """Return the position of an example in the source, for messages."""
        return self._source.place(part, number)

    def notes(self) -> Sequence[str]:
        """Return the notes of the source."""
        return self._source.notes()

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the source."""
        return self._source.facts()

    def _map(self, part: Part) -> Iterator[tuple[Batch, list[_Row]]]:
        function = user_code.find_function("data.map", self._config.map)
        call = _several if getattr(function, "batched", False) else _one_by_one
        number = 0
        for batch in self._source.read(part, self._given):
            given = _make_arguments(batch.columns, self._given.specs)
            results = call(function, given, len(batch.splits))
            rows, end = [], number + len(batch.splits)
            try:
                for result in results:
                    if result is not None:
                        rows.append(_Row(part, number, make_example(result)))
                    number += 1
            except UnsuitableError as error:
                raise self._make_error(error, part, number) from None
            # Catch everything, because the user's code may raise any exception.
            except Exception as error:
                said = f"{user_code.format_error(error)}, for {self.place(part, number)}"
                raise UserError(f"{self.name}: {said}") from error
            number = end
            yield batch, rows

    def _make_error(self, error: object, part: Part, number: int) -> UserError:
        return UserError(f"{self.name} {error} ({self.place(part, number)})")

    def _refuse(self, row: _Row, what: str) -> None:
        said = f"must return the same names for every row, but returned {what}"
        raise self._make_error(said, row.part, row.number)

    def _store(self, row: _Row, name: str, selection: Selection) -> Any:
        if name not in row.example:
            self._refuse(row, f"no {name!r}")
        try:
            value = convert_value(name, row.example[name], self._config.types.get(name, ""))
            return store_value(name, value, selection.specs[name], selection.fits.get(name))
        except UnsuitableError as error:
            raise self._make_error(error, row.part, row.number) from None

    def _leaf(self, name: str, rows: Sequence[_Row], classes: Any) -> Leaf:
        said, given = self._config.types.get(name, ""), self._given.specs.get(name)
        value, is_kept = rows[0].example[name], given is not None and given.stored == "image"
        if said == "image" or (not said and is_kept and not value.ndim and value.dtype == _TEXT):
            return image_leaf(self._config.image)
        values: list[Any] = []
        for row in rows:
            try:
                values.append(convert_value(name, row.example[name], said))
                # Infer the feature as soon as a value differs, so that an error names this example.
                if values[-1].dtype != values[0].dtype or values[-1].ndim != values[0].ndim:
                    infer_leaf(name, values, classes)
            except UnsuitableError as error:
                raise self._make_error(error, row.part, row.number) from None
        return infer_leaf(name, values, classes)

    def _classes(self, first: Sequence[_Row]) -> dict[str, Any]:
        labels = self._config.label or (DEFAULT_LABEL,)
        said = self._config.types
        found: dict[str, Any] = {}
        wanted: dict[str, set[Any]] = {}
        for name, value in first[0].example.items():
            is_text = value.dtype == _TEXT
            if said.get(name) == "class" or (is_text and name in labels and name not in said):
                wanted[name] = set()
            elif (given := self._get_source_classes(name)) and value.dtype.kind in "iu":
                found[name] = given
        if wanted:
            with Work("reading the classes", "rows", self._source.total) as work:
                for part in self._source.parts():
                    for batch, rows in self._map(part):
                        work.add(len(batch.splits))
                        for row in rows:
                            for name, values in wanted.items():
                                values.update(np.ravel(row.example.get(name, ())).tolist())
        return found | {name: _class_label(self.name, name, each) for name, each in wanted.items()}

    def _get_source_classes(self, name: str) -> Any:
        spec = self._given.specs.get(name)
        if spec is None or not spec.num_classes:
            return None
        if spec.labels:
            return tfds.features.ClassLabel(names=list(spec.labels))
        return tfds.features.ClassLabel(num_classes=spec.num_classes)


def _class_label(source: str, name: str, values: set[Any]) -> Any:
    texts = {each for each in values if isinstance(each, bytes)}
    if texts and len(texts) == len(values):
        names = sorted(each.decode(errors="surrogateescape") for each in texts)
        return tfds.features.ClassLabel(names=names)
    if not values or not all(isinstance(each, int) for each in values) or min(values) < 0:
        raise UserError(
            f"{source}: the classes of {name!r} must be strings, or whole numbers of at least 0; "
            f"found {min(values - texts, default=None)!r}"
        )
    return tfds.features.ClassLabel(num_classes=int(max(values)) + 1)


def _one_by_one(
    function: Callable[..., Any], given: Mapping[str, Any], count: int
) -> Iterator[Any]:
    for index in range(count):
        yield function({name: values[index] for name, values in given.items()})


def _several(function: Callable[..., Any], given: Mapping[str, Any], count: int) -> Iterator[Any]:
    columns = dict(function(dict(given)))
    for name, values in columns.items():
        if len(values) != count:
            raise ValueError(f"returned {len(values)} values of {name!r} for {count} examples")
    for index in range(count):
        yield {name: values[index] for name, values in columns.items()}


def _make_arguments(columns: Mapping[str, Any], specs: Mapping[str, FeatureSpec]) -> dict[str, Any]:
    rows = {name: make_rows(spec, columns[name]) for name, spec in specs.items() if name in columns}
    of_texts = [each for each in rows if specs[each].dtype == "string"]
    return rows | {name: _decode(rows[name]) for name in of_texts if specs[name].stored != "image"}


def _decode(values: Any) -> Any:
    """Return strings as `str`, in arrays of the same shape. Invalid UTF-8 is escaped."""
    found = np.empty(len(values), object)
    for index, value in enumerate(values):
        if isinstance(value, bytes):
            found[index] = value.decode(errors="surrogateescape")
        else:
            found[index] = _decode(value) if isinstance(value, np.ndarray | list) else value
    return found


def make_example(result: Any) -> Example:
    """Return the values of an example as arrays. Strings become object arrays of bytes.

    Python integers become int64. Python floats and other 64-bit floats become float32. Raises
    `UnsuitableError` if the result is not a mapping, or a value cannot be stored.
    """
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise UnsuitableError(f"returns {_kind(result)}, not a dict of values by name")
    if not result:
        raise UnsuitableError("returns an empty dict; to drop an example, return None")
    return {name: make_value(name, value) for name, value in result.items()}


def make_value(name: str, value: Any) -> Value:
    """Convert a value to an array. Raises `UnsuitableError`."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if value is None:
        raise UnsuitableError(f"returns None for {name!r}; return NaN for a missing number")
    try:
        # Store strings as objects, because NumPy's string types lose trailing NULs.
        array = np.asarray(value, object if isinstance(value, bytes | str) else None)
    except ValueError:
        raise UnsuitableError(f"returns lists of different lengths within {name!r}") from None
    if array.dtype.kind in "USO":
        every = array if array.dtype == _TEXT else np.array(value, object)
        found = np.empty(every.shape, object)
        for place, each in np.ndenumerate(every):
            if not isinstance(each, str | bytes):
                raise UnsuitableError(
                    f"returns {_kind(each)} within {name!r}, which cannot be stored"
                )
            found[place] = each.encode(errors="surrogateescape") if isinstance(each, str) else each
        return found
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UnsuitableError(f"returns {name!r} as {array.dtype}, which cannot be stored")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def convert_value(name: str, value: Value, said: str) -> Value:
    """Convert a value to `said`, its type in `data.types`. Raises `UnsuitableError`."""
    if said == "text" and value.dtype != _TEXT:
        return make_value(name, value.astype(str))
    try:
        return value.astype(_CAST.get(said, value.dtype), copy=False)
    except ValueError:
        raise UnsuitableError(
            f"returns {name!r} as {get_dtype(value)}, which is not of type {said}"
        ) from None


def get_dtype(value: Value) -> str:
    """Return the NumPy name of the type of a value, or "string"."""
    return "string" if value.dtype == _TEXT else value.dtype.name


def infer_leaf(name: str, values: Sequence[Value], classes: Any = None) -> Leaf:
    """Infer a feature from its first values. `classes` is its TFDS class feature, if it has one."""
    shapes = {value.shape for value in values}
    # Skip empty lists, whose type is arbitrary.
    kinds = {value.dtype for value in [each for each in values if each.size] or values}
    if len({len(shape) for shape in shapes}) > 1:
        one, other = sorted(shapes, key=len)[:: len(shapes) - 1]
        raise UnsuitableError(
            f"returns {name!r} with shape {one} for some rows and {other} for others"
        )
    if not classes and len(kinds) > 1 and _TEXT in kinds:
        raise UnsuitableError(
            f"returns {name!r} as a string for some rows and as a number for others"
        )
    sizes = (set(axis) for axis in zip(*shapes, strict=True))
    shape = tuple(next(iter(axis)) if len(axis) == 1 else None for axis in sizes)
    dtype = np.dtype(np.int64) if classes else np.result_type(*kinds)
    if len(kinds) > 1 and dtype == np.float64:
        dtype = np.dtype(np.float32)
    tensor = tfds.features.TensorInfo(shape=shape, dtype=np.str_ if dtype == _TEXT else dtype)
    return Leaf(connector=None if shape else classes, element=classes, tensor=tensor)


def image_leaf(config: ImageConfig) -> Leaf:
    """Return the feature of an encoded image. Raises `ConfigError` if the size is not set."""
    if not config.size:
        raise ConfigError("data.image: the function of data.map returns images; set their size")
    image = tfds.features.Image(shape=(None, None, config.channels))
    return Leaf(connector=image, element=image, tensor=image.get_tensor_info())


def store_value(name: str, value: Value, spec: FeatureSpec, fit: Fit | None) -> Any:
    """Convert a value to its stored shape and type. Raises `UnsuitableError`."""
    if spec.stored == "image":
        return _store_image(name, value, spec)
    if value.dtype == _TEXT and spec.labels:
        value = _number_classes(name, value, spec)
    if not value.size:
        # Give an empty list the type of the feature, because its own type is arbitrary.
        value = value.astype(_TEXT if spec.dtype == "string" else numpy_type(spec))
    if fit is not None:
        whole = value.astype(np.int64) if fit.method == "multi_hot" else value
        value = fit_value(fit, tf.constant(whole)).numpy()
    inner = len(spec.shape) == value.ndim and all(
        size in {None, found} for size, found in zip(spec.shape, value.shape, strict=True)
    )
    if not inner:
        raise UnsuitableError(
            f"returns {name!r} with shape {value.shape}, but with shape {spec.shape} for the first "
            f"examples; set data.shapes to {{{name}: {[0, *value.shape[1:]]}}}, or to another "
            "shape"
        )
    if get_dtype(value) == spec.dtype:
        return value
    able = spec.dtype != "string" and value.dtype != _TEXT
    if not (able and np.can_cast(value.dtype, spec.dtype, "same_kind")):
        raise UnsuitableError(
            f"returns {name!r} as {get_dtype(value)}, but as {spec.dtype} for the first examples"
        )
    return value.astype(spec.dtype)


def _store_image(name: str, value: Value, spec: FeatureSpec) -> bytes:
    if value.dtype == _TEXT and value.shape == ():
        try:
            return images.stored_image(value.item(), spec.sizes[-1])
        except images.UndecodableError as error:
            raise UnsuitableError(f"returns {name!r}, which cannot be decoded: {error}") from None
    pixels = value[..., np.newaxis] if value.ndim == len(("height", "width")) else value
    if pixels.dtype != np.uint8 or pixels.shape[2:] != spec.shape[2:]:
        raise UnsuitableError(
            f"returns {name!r} as {get_dtype(value)} with shape {value.shape}; return the bytes of "
            f"an image file, or a uint8 array of shape (height, width, {spec.shape[-1]})"
        )
    return images.encode_png(pixels)


@lru_cache(maxsize=16)
def _index_classes(labels: tuple[str, ...]) -> dict[bytes, int]:
    return {text.encode(errors="surrogateescape"): number for number, text in enumerate(labels)}


def _number_classes(name: str, value: Value, spec: FeatureSpec) -> Value:
    known = _index_classes(spec.labels)
    found = np.empty(value.shape, np.int64)
    for place, each in np.ndenumerate(value):
        if each not in known:
            raise UnsuitableError(
                f"returns the class {each.decode(errors='replace')!r} of {name!r}, which it did "
                "not return before; return the same result for the same row"
            )
        found[place] = known[each]
    return found
