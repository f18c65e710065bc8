"""What a function of the user's returns as an example: its values as arrays, and their features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray

from trainer.config.data import ImageConfig
from trainer.data.examples import images
from trainer.data.shapes import Fit, Leaf
from trainer.data.spec import FeatureSpec
from trainer.errors import ConfigError

Value = NDArray[Any]
Example = dict[str, Value]
_TEXT = np.dtype(object)
_CAST: dict[str, np.dtype[Any]] = {
    "int": np.dtype(np.int64),
    "float": np.dtype(np.float32),
    "bool": np.dtype(bool),
}


class UnsuitableError(ValueError):
    """An example cannot be stored; the message goes on from where it is."""


def example_of(result: Any) -> Example:
    """Return the values of an example as arrays; texts are bytes in arrays of objects.

    Numbers of Python and floats of 64 bits become int64 and float32.

    Raises:
        UnsuitableError: it is no mapping from names to values, or a value is of no use.
    """
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise UnsuitableError(f"gives {_kind(result)}, and no dict from names to values")
    if not result:
        raise UnsuitableError("gives an empty dict; return None to leave an example out")
    return {name: value_of(name, value) for name, value in result.items()}


def value_of(name: str, value: Any) -> Value:
    """Return one value as an array; raises `UnsuitableError`."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if value is None:
        raise UnsuitableError(f"gives None for {name!r}; give NaN for a number that is missing")
    try:
        # NumPy takes away the zeros at the end of bytes.
        has_bytes = isinstance(value, bytes)
        array = np.array(value, object) if has_bytes else np.asarray(value)
    except ValueError:
        raise UnsuitableError(f"gives lists of different lengths within {name!r}") from None
    if array.dtype.kind in "USO":
        return _texts(name, value, array)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UnsuitableError(f"gives {name!r} as {array.dtype}, which cannot be stored")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _texts(name: str, value: Any, array: Value) -> Value:
    every = array if array.dtype == _TEXT or isinstance(value, str) else np.array(value, object)
    flat = np.ravel(every).tolist()
    for each in flat:
        if not isinstance(each, str | bytes):
            raise UnsuitableError(f"gives {_kind(each)} within {name!r}, which cannot be stored")
    found = np.empty(len(flat), object)
    found[:] = [
        each.encode(errors="surrogateescape") if isinstance(each, str) else each for each in flat
    ]
    return found.reshape(every.shape)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def as_said(name: str, value: Value, said: str) -> Value:
    """Return a value in the type that `data.types` says; raises `UnsuitableError`."""
    if said == "text" and value.dtype != _TEXT:
        return value_of(name, value.astype(str))
    if said not in _CAST or value.dtype == _CAST[said]:
        return value
    try:
        found: Value = value.astype(_CAST[said])
    except ValueError:
        raise UnsuitableError(f"gives {name!r} as {dtype_of(value)}, which is no {said}") from None
    return found


def dtype_of(value: Value) -> str:
    """Return NumPy's name of the type; "string" for texts."""
    return "string" if value.dtype == _TEXT else value.dtype.name


def dtype_for(name: str, values: Sequence[Value]) -> np.dtype[Any]:
    """Return the type that holds all of these; raises `UnsuitableError`."""
    kinds = {value.dtype for value in values}
    if len(kinds) == 1:
        return values[0].dtype
    if _TEXT in kinds:
        raise UnsuitableError(f"gives {name!r} as a text, and others as a number")
    wide = np.result_type(*kinds)
    return np.dtype(np.float32) if wide == np.float64 else wide


def leaf_for(name: str, values: Sequence[Value], classes: Any = None) -> Leaf:
    """Return the feature whose first examples are these; raises `UnsuitableError`.

    `classes` is the TFDS feature of one class, where the values are classes.
    """
    shapes = {value.shape for value in values}
    if len({len(shape) for shape in shapes}) > 1:
        one, other = sorted(shapes, key=len)[:: len(shapes) - 1]
        raise UnsuitableError(f"gives {name!r} of shape {one}, and others of shape {other}")
    sizes = (set(axis) for axis in zip(*shapes, strict=True))
    shape = tuple(next(iter(axis)) if len(axis) == 1 else None for axis in sizes)
    dtype = np.dtype(np.int64) if classes else dtype_for(name, values)
    tensor = tfds.features.TensorInfo(shape=shape, dtype=np.str_ if dtype == _TEXT else dtype)
    return Leaf(connector=None if shape else classes, element=classes, tensor=tensor)


def image_leaf(config: ImageConfig) -> Leaf:
    """Return the feature of an encoded image; raises `ConfigError` without a size."""
    if not config.size:
        raise ConfigError("data.image: the function of data.map gives images; set its size")
    image = tfds.features.Image(shape=(None, None, config.channels))
    return Leaf(connector=image, element=image, tensor=image.get_tensor_info())


def stored(name: str, value: Value, spec: FeatureSpec, fit: Fit | None) -> Any:
    """Return a value in the shape and type in which it is stored; raises `UnsuitableError`."""
    if spec.stored == "image":
        return _stored_image(name, value, spec)
    if value.dtype == _TEXT and spec.labels:
        value = _classes(name, value, spec)
    if fit is not None:
        value = _fitted(fit, value)
    inner = len(spec.shape) == value.ndim and all(
        size in {None, found} for size, found in zip(spec.shape, value.shape, strict=True)
    )
    if not inner:
        raise UnsuitableError(
            f"gives {name!r} of shape {value.shape}, and the first examples of shape {spec.shape}; "
            f"set data.shapes to {{{name}: {[0, *value.shape[1:]]}}}, or to another shape"
        )
    if dtype_of(value) != spec.dtype:
        able = spec.dtype != "string" and value.dtype != _TEXT
        if not (able and np.can_cast(value.dtype, spec.dtype, "same_kind")):
            raise UnsuitableError(
                f"gives {name!r} as {dtype_of(value)}, and the first examples as {spec.dtype}"
            )
        value = value.astype(spec.dtype)
    return value


def _stored_image(name: str, value: Value, spec: FeatureSpec) -> bytes:
    if value.dtype == _TEXT and value.shape == ():
        try:
            return images.stored_image(value.item(), spec.sizes[-1])
        except images.UndecodableError as error:
            raise UnsuitableError(f"gives {name!r}, which does not decode: {error}") from None
    pixels = value[..., np.newaxis] if value.ndim == len(("height", "width")) else value
    if pixels.dtype != np.uint8 or pixels.shape[2:] != spec.shape[2:]:
        raise UnsuitableError(
            f"gives {name!r} as {dtype_of(value)} of shape {value.shape}; an image is the bytes of "
            f"a file, or uint8 of shape (height, width, {spec.shape[-1]})"
        )
    return images.encode(pixels)


def _classes(name: str, value: Value, spec: FeatureSpec) -> Value:
    known = {text.encode(): number for number, text in enumerate(spec.labels)}
    for each in np.ravel(value):
        if each not in known:
            text = each.decode(errors="replace")
            raise UnsuitableError(
                f"gives the new class {text!r} of {name!r}: it has to give the same for the same"
            )
    flat = [known[each] for each in np.ravel(value)]
    return np.array(flat, np.int64).reshape(value.shape)


def _fitted(fit: Fit, value: Value) -> Value:
    if fit.method == "multi_hot":
        found = np.zeros(fit.shape, bool)
        found[value.astype(np.int64)] = True
        return found
    cut = value[tuple(slice(size) for size in fit.shape)]
    after = [(0, size - found) for size, found in zip(fit.shape, cut.shape, strict=True)]
    fill = b"" if fit.fill == "" else fit.fill
    typed = cut if fit.dtype == "string" else cut.astype(fit.dtype)
    return np.pad(typed, after, constant_values=fill)
