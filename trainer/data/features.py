"""Which features of a TFDS dataset are kept, how they are stored, and which is the label."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from trainer.data.spec import FeatureSpec
from trainer.errors import UserError

DEFAULT_LABEL = "label"
_log = logging.getLogger(__name__)
_OWN_BUILDER = "write your own builder (data.dataset: package.module:Builder)"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The kept features by name, and their roles.

    Nested features are named by their path, `outer/inner`. `connectors` are the TFDS features that
    they come from. `targets` are predicted; `weight` and `group` are empty where there is none.
    """

    specs: Mapping[str, FeatureSpec]
    connectors: Mapping[str, Any]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    weight: str = ""
    group: str = ""


def select(name: str, info: Any) -> Selection:
    """Choose the features of a dataset by its `tfds.core.DatasetInfo`, before any download.

    With `supervised_keys` these are inputs and label; without, a feature called `label` is the
    label and all others are inputs. What is neither is kept as well if it has a fixed shape.

    Raises:
        UserError: there is no label, or a shape that is not fixed.
    """
    if not isinstance(info.features, tfds.features.FeaturesDict):
        raise UserError(
            f"data.dataset: {name} gives {type(info.features).__name__} and no named features; "
            f"{_OWN_BUILDER} that gives a FeaturesDict"
        )
    leaves = dict(_leaves(info.features, info.features.get_tensor_info()))
    inputs, label = _roles(name, info.supervised_keys, list(leaves))
    for feature in (*inputs, label):
        if not _is_fixed(tensor := leaves[feature][1]):
            raise UserError(
                f"data.dataset: the feature {feature!r} of {name} is {_form(tensor)}: examples "
                f"differ in shape; {_OWN_BUILDER} that resizes or pads it to one shape"
            )
    kept = {feature: _spec(*leaf) for feature, leaf in leaves.items() if _is_fixed(leaf[1])}
    if left_out := sorted(leaves.keys() - kept.keys()):
        _log.info("%s: %s left out, the shape is not fixed", name, ", ".join(left_out))
    if kept[label].stored != "int":
        raise UserError(
            f"data.dataset: the label {label!r} of {name} is {_form(leaves[label][1])} and not one "
            f"integer; {_OWN_BUILDER} with a ClassLabel"
        )
    return Selection(
        specs=kept,
        connectors={feature: leaves[feature][0] for feature in kept},
        inputs=inputs,
        targets=(label,),
    )


def stored_form(shape: tuple[int, ...], dtype: str) -> str:
    """Return how a feature is stored.

    Scalars become numbers that every tool can show. Those that an int64 or a float32 would change
    stay bytes, as tensors do.
    """
    if dtype == "string":
        return "bytes"
    if shape or dtype in {"uint64", "float64"}:
        return "raw"
    return {"i": "int", "u": "int", "b": "int", "f": "float"}.get(np.dtype(dtype).kind, "raw")


def save_record_features(selection: Selection, folder: Path) -> None:
    """Write `features.json`, by which TFDS itself can read the records (`deserialize_example`).

    But for tensors of uint32, which TFDS 4.9 writes and cannot decode.
    """
    features = {
        name: _as_recorded(spec, selection.connectors[name])
        for name, spec in selection.specs.items()
    }
    tfds.features.FeaturesDict(features).save_config(folder)


def _leaves(connector: Any, tensor: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tensor, Mapping):
        for key, inner in tensor.items():
            below = connector[key] if isinstance(connector, tfds.features.FeaturesDict) else None
            yield from _leaves(below, inner, f"{path}/{key}" if path else key)
    else:
        yield path, (connector, tensor)


def _roles(name: str, keys: Any, leaves: list[str]) -> tuple[tuple[str, ...], str]:
    if keys:
        inputs = [leaf for key in _flat(keys[0]) for leaf in _below(key, leaves)]
        outputs = [leaf for key in _flat(keys[1]) for leaf in _below(key, leaves)]
        if len(outputs) == 1 and inputs:
            return tuple(dict.fromkeys(inputs)), outputs[0]
        raise UserError(
            f"data.dataset: the supervised_keys {keys} of {name} do not name inputs and one label; "
            f"{_OWN_BUILDER} that does"
        )
    inputs = [leaf for leaf in leaves if leaf != DEFAULT_LABEL]
    if DEFAULT_LABEL in leaves and inputs:
        return tuple(inputs), DEFAULT_LABEL
    raise UserError(
        f"data.dataset: {name} does not say what its label is (features: {', '.join(leaves)}); "
        f"{_OWN_BUILDER} with supervised_keys"
    )


def _flat(keys: Any) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    values = keys.values() if isinstance(keys, Mapping) else keys
    return [key for value in values for key in _flat(value)]


def _below(key: str, leaves: list[str]) -> list[str]:
    return [leaf for leaf in leaves if leaf == key or leaf.startswith(f"{key}/")]


def _is_fixed(tensor: Any) -> bool:
    return None not in tensor.shape and not tensor.dataset_lvl


def _form(tensor: Any) -> str:
    return f"{_type_name(tensor)} of shape {tuple(tensor.shape)}"


def _spec(connector: Any, tensor: Any) -> FeatureSpec:
    shape = tuple(int(size) for size in tensor.shape)
    dtype = _type_name(tensor)
    is_class = isinstance(connector, tfds.features.ClassLabel) and connector.num_classes
    return FeatureSpec(
        shape=shape,
        dtype=dtype,
        stored=stored_form(shape, dtype),
        num_classes=connector.num_classes if is_class else 0,
        labels=tuple(connector.names) if is_class else (),
    )


def _type_name(tensor: Any) -> str:
    name = np.dtype(tensor.np_dtype).name
    return "string" if name == "object" else name


def _as_recorded(spec: FeatureSpec, connector: Any) -> Any:
    if isinstance(connector, tfds.features.ClassLabel) and spec.stored == "int":
        return connector
    encoding = "bytes" if spec.stored == "raw" else "none"
    dtype = np.str_ if spec.dtype == "string" else spec.dtype
    return tfds.features.Tensor(shape=spec.shape, dtype=np.dtype(dtype), encoding=encoding)
