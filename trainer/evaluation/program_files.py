"""Reads a model that a user's program has written, as a SavedModel or a `.keras` file.

A SavedModel is called through its serving signature. A `.keras` file is loaded by Keras 3, which
can also read some files of Keras 2.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from flotilla.trainer.evaluation.signature import SERVING
from flotilla.trainer.models import keras_file
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse_mapping

SAVED_MODEL, KERAS = "saved_model", "keras"
_PROTO, _SUFFIX = "saved_model.pb", ".keras"
_SERVE = "serve"
_VERSION = re.compile(r"[0-9]{1,18}")
# Operations of TensorFlow 1 variables that are not resource variables.
_REFERENCES = {"Variable", "VariableV2"}


Size = int | None


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a model. The shape includes the batch axis. None means any shape."""

    name: str
    shape: tuple[Size, ...] | None
    dtype: str

    def __str__(self) -> str:
        """Return a description for messages."""
        return f"{self.name!r} ({describe_tensor(self.dtype, self.shape)})"


def describe_tensor(dtype: str, shape: tuple[Size, ...] | None) -> str:
    """Describe a tensor and its batch axis for a message, as in `float32 [any, 3]`."""
    sizes = "..." if shape is None else ", ".join("any" if n is None else str(n) for n in shape)
    return f"{dtype} [{sizes}]"


@dataclass(frozen=True, kw_only=True)
class Callee:
    """A loaded model.

    Attributes:
        takes: its arguments, keyed by name, or None if the model does not declare them.
        call: calls the model with tensors or symbolic tensors by argument, or by feature if it
            declares no arguments. The result has the outputs by name.
    """

    takes: Mapping[str, Argument] | None
    call: Callable[[Mapping[str, Any]], dict[str, Any]]


def find_model(paths: Sequence[str]) -> tuple[str, str]:
    """Return the layout of a model and its path, given the paths of the files in its folder.

    For a SavedModel, this is the path of its folder: the given folder, the subfolder with the
    highest version number, or else the only subfolder that has a SavedModel. Raises `UserError` if
    there is no model, or more than one.
    """
    if _PROTO in paths:
        return SAVED_MODEL, ""
    folders = [path.rpartition("/")[0] for path in paths if path.endswith(f"/{_PROTO}")]
    numbers = [name for name in folders if _VERSION.fullmatch(name)]
    if numbers:
        return SAVED_MODEL, max(numbers, key=int)
    if len(folders) == 1:
        return SAVED_MODEL, folders[0]
    files = [path for path in paths if path.endswith(_SUFFIX)]
    if len(files) == 1 and not folders:
        return KERAS, files[0]
    there = ", ".join(sorted([*folders, *files] or paths)[:3]) or "nothing"
    raise UserError(f"FLOTILLA_MODEL contains {there}; write one SavedModel or one .keras file")


def read_model(path: Path, layout: str) -> Callee:
    """Load the model at a path. Raises `UserError`."""
    return _read_saved_model(path) if layout == SAVED_MODEL else _read_keras(path)


class Signature(keras.layers.Layer):
    """A layer that calls a SavedModel's signature with tensors by argument name."""

    def __init__(self, loaded: Any, function: Any) -> None:
        """Store a loaded SavedModel, to keep its variables alive, and the signature to call."""
        # Without `autocast=False`, Keras would cast the inputs to the layer's type.
        super().__init__(name="program", trainable=False, autocast=False)
        self._loaded, self._function = loaded, function
        self.supports_jit = False

    def call(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the signature, keyed by name."""
        found: dict[str, Any] = self._function(**inputs)
        return found

    def build(self, input_shape: Any) -> None:
        """Do nothing, because the SavedModel already has its variables."""
        del input_shape


def _read_saved_model(folder: Path) -> Callee:
    graphs = _read_graphs(folder / _PROTO)
    try:
        if any(node.op in _REFERENCES for graph in graphs for node in graph.graph_def.node):
            loaded, function, takes = _freeze(folder)
        else:
            loaded = tf.saved_model.load(folder, tags=[_SERVE] if len(graphs) > 1 else None)
            function = loaded.signatures[_choose_signature(loaded.signatures)]
            _, takes = function.structured_input_signature
    except UserError:
        raise
    # Loading another program's SavedModel may raise any exception.
    except Exception as error:
        raise UserError(f"TensorFlow cannot load it: {user_code.short_message(error)}") from error
    arguments = {
        name: Argument(
            name=name,
            shape=None if each.shape.rank is None else tuple(each.shape.as_list()),
            dtype=each.dtype.name,
        )
        for name, each in takes.items()
    }
    return Callee(takes=arguments, call=Signature(loaded, function))


def _choose_signature(names: Iterable[str]) -> str:
    known = [name for name in names if not name.startswith("__")]
    if SERVING in known:
        return SERVING
    if len(known) == 1:
        return known[0]
    there = ", ".join(map(repr, sorted(known))) or "none"
    raise UserError(
        f"the SavedModel has no signature {SERVING!r} (it has {there}); pass the function that "
        f"takes the features to tf.saved_model.save as signatures={{{SERVING!r}: ...}}"
    )


def _freeze(folder: Path) -> tuple[Any, Any, Mapping[str, Any]]:
    """Load a TensorFlow 1 model with its variables as constants. Return a function that calls it.

    TensorFlow 2 can call this model with variables, but cannot save it again.
    """
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        known = v1.saved_model.load(session, [_SERVE], str(folder)).signature_def
        signature = known[_choose_signature(known)]
        takes, gives = (
            {name: info.name for name, info in each.items()}
            for each in (signature.inputs, signature.outputs)
        )
        nodes = [name.partition(":")[0] for name in gives.values()]
        frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), nodes)
    whole = v1.wrap_function(lambda: tf.import_graph_def(frozen, name=""), [])
    find = whole.graph.get_tensor_by_name
    given = {name: find(tensor) for name, tensor in takes.items()}
    function = whole.prune([*given.values()], {name: find(each) for name, each in gives.items()})
    return whole, lambda **values: function(*(values[name] for name in given)), given


def _read_graphs(path: Path) -> Sequence[MetaGraphDef]:
    """Return the graphs of a SavedModel, after removing device names of a training cluster.

    A TensorFlow 1 program may save the names of devices, such as `/job:ps/task:0`, that other
    processes do not have.
    """
    proto = SavedModel()
    try:
        proto.ParseFromString(path.read_bytes())
    # Catch any exception, because its class depends on the implementation of Protobuf.
    except Exception:
        raise UserError(f"{path.name} is not a SavedModel; write the model again") from None
    changed = False
    for graph in proto.meta_graphs:
        functions = graph.graph_def.library.function
        for nodes in (graph.graph_def.node, *(each.node_def for each in functions)):
            for node in nodes:
                if "/job:" in node.device:
                    node.device, changed = "", True
    if changed:
        path.write_bytes(proto.SerializeToString())
    return list(proto.meta_graphs)


def _read_keras(path: Path) -> Callee:
    try:
        with zipfile.ZipFile(path) as file:
            version = str(parse_mapping(file.read("metadata.json")).get("keras_version", ""))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UserError(
            f"{path.name} is not a complete .keras file ({user_code.short_message(error)}); write "
            "it again"
        ) from None
    try:
        model = keras_file.read(path)
    # A user's classes may raise any exception.
    except Exception as error:
        raise UserError(
            f"Keras {keras.__version__} cannot read {path.name} of Keras {version}: "
            f"{user_code.short_message(error)}; export a SavedModel with model.export, which does "
            "not need the classes of the program"
        ) from error
    return _wrap_keras(model)


def _wrap_keras(model: keras.Model) -> Callee:
    graph = getattr(model, "_functional", None) or model
    inputs = getattr(graph, "_inputs_struct", None)
    takes = None
    if inputs is not None:
        takes = {
            name: Argument(name=name, shape=tuple(each.shape), dtype=each.dtype)
            for name, each in _by_name(inputs, getattr(graph, "input_names", ())).items()
        }

    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        values: Any = list(given.values())
        if isinstance(inputs, Mapping) or (inputs is None and len(values) > 1):
            values = dict(given)
        elif len(values) == 1 and not isinstance(inputs, list | tuple):
            values = values[0]
        with keras_file.inputs_by_feature():
            found = model(values, training=False)
        return _by_name(found, getattr(model, "output_names", ()))

    return Callee(takes=takes, call=call)


def _by_name(values: Any, names: Any) -> dict[str, Any]:
    """Return inputs or outputs, keyed by name. Listed ones get the given names, or numbers."""
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, list | tuple):
        known = list(names) if len(names) == len(values) else list(map(str, range(len(values))))
        return dict(zip(known, values, strict=True))
    return {"output": values}
