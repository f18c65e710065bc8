"""Uses the model that a user's program has written as a Keras model.

The Keras model accepts the features of the dataset and returns the outputs that its task expects,
so that it can be evaluated, compared, exported and served like a model trained by Flotilla.

An argument of the program's model receives the feature with the same name, or the feature that has
this name in Flotilla's own signatures. A single argument receives a single feature regardless of
its name. Values are converted if their type or shape differs, but their meaning does not change.

An output is recognized by its name: `logits`, `logit`, `probabilities`, `probability`, `prediction`
or `predictions`. If there are several targets, the name of an output is the name of its target, or
begins with it. A single output may have any name. Whether values are probabilities is set by
`program.outputs`, or inferred from the outputs for real examples.

A SavedModel is called through its serving signature. A `.keras` file is loaded by Keras 3, which
can also read some files of Keras 2.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from flotilla.trainer.checkpoints.checkpoints import RestoredCheckpoint
from flotilla.trainer.evaluation.signature import SERVING
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import argument_names, layer_name
from flotilla.trainer.models import keras_file
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import UserError, nearest
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.tasks.base import Array, Task
from flotilla.trainer.tasks.objective import Objective

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


PROGRAM = "program"
AUTO, PROBABILITIES, LOGITS, NUMBERS = "auto", "probabilities", "logits", "numbers"
# How to interpret the values of an output with this name, or empty to infer this from the values.
_NAMED = {
    "logits": LOGITS,
    "logit": LOGITS,
    "probabilities": PROBABILITIES,
    "probability": PROBABILITIES,
    "prediction": NUMBERS,
    "predictions": "",
}
_TWO = 2
# Tolerance for the rounding errors of a sum of probabilities in half precision.
_NEARLY = 5e-3
_SMALLEST = float(np.finfo(np.float32).tiny)
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def load_program_model(
    found: RestoredCheckpoint,
    spec: DatasetSpec,
    objective: Objective,
    examples: Mapping[str, Any],
    said: str,
) -> tuple[keras.Model, dict[str, Any]]:
    """Load the model from a fetched checkpoint of a program.

    `examples` are real examples, keyed by feature. `said` is the value of `program.outputs`. The
    second result is the entry for `metrics.json` and for a model's manifest: the layout, and how
    each output was interpreted. Raises `UserError` if there is no model, or if it does not fit the
    dataset and the task.
    """
    place = str((found.fields.get(PROGRAM) or {}).get("model") or "")
    folder = found.folder / place
    if not place or not folder.is_dir():
        raise UserError(
            f"{found.uri} has no model; let the program write a SavedModel or a .keras file to "
            "FLOTILLA_MODEL, or set program.after_training: stop"
        )
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        layout, path = find_model(paths)
        callee = read_model(folder / path, layout)
        model, taken = _wrap(callee, spec, objective, examples, said)
        return model, {"layout": layout, "outputs": taken}
    except UserError as error:
        raise UserError(f"the program's model in {found.uri}: {error}") from error


def _wrap(
    callee: Callee,
    spec: DatasetSpec,
    objective: Objective,
    examples: Mapping[str, Any],
    said: str,
) -> tuple[keras.Model, dict[str, str]]:
    takes = callee.takes
    features = match_arguments(spec, takes) if takes is not None else {}

    def ask(given: Mapping[str, Any]) -> dict[str, Any]:
        if takes is None:
            return callee.call({name: given[name] for name in spec.inputs})
        return callee.call({
            name: convert(given[feature], spec.features[feature], takes[name])
            for name, feature in features.items()
        })  # fmt: skip

    answers = _answer(ask, examples)
    matched = match_outputs(objective.task, answers, said, frozenset(spec.swapped))
    symbols = InputSpec.of(spec.features, spec.inputs, objective.task.output_shape).symbols()
    named = symbols if isinstance(symbols, Mapping) else {spec.inputs[0]: symbols}
    given = ask(named)
    found = {
        name: keras.layers.Identity(name=f"flotilla_output_{place}")(each.convert(given[each.name]))
        for place, (name, each) in enumerate(matched.items())
    }
    result = found.get("", found)
    model = keras.Model(symbols, result, name="program_model")
    objective.accept(model, result)
    return model, {name: each.taken for name, each in matched.items()}


def _answer(
    ask: Callable[[Mapping[str, Any]], dict[str, Any]], examples: Mapping[str, Any]
) -> dict[str, Any]:
    rows = len(next(iter(examples.values())))
    try:
        given = {name: tf.convert_to_tensor(values) for name, values in examples.items()}
        answers = {name: _to_array(each) for name, each in ask(given).items()}
    # A user's model may raise any exception.
    except Exception as error:
        raise UserError(
            f"the model fails on {rows} examples of the dataset: {user_code.short_message(error)}"
        ) from error
    for name, values in answers.items():
        if not values.ndim or len(values) != rows:
            raise UserError(
                f"the output {name!r} has shape {list(values.shape)} for {rows} examples; return "
                "one row for each example"
            )
    return answers


def _to_array(value: Any) -> Array:
    # NumPy has no bfloat16.
    if getattr(value, "dtype", None) == tf.bfloat16:
        value = tf.cast(value, tf.float32)
    return np.asarray(value)


def match_arguments(spec: DatasetSpec, takes: Mapping[str, Argument]) -> dict[str, str]:
    """Return the feature for each argument. Raises `UserError` if an argument fits none."""
    if len(takes) == len(spec.inputs) == 1:
        found = dict(zip(takes, spec.inputs, strict=True))
    else:
        known = {layer_name(name): name for name in spec.inputs}
        known |= {argument: name for name, argument in argument_names(spec.inputs).items()}
        known |= {name: name for name in spec.inputs}
        for name, argument in takes.items():
            if name not in known:
                hint = nearest(name, known) or f" (its inputs: {', '.join(spec.inputs)})"
                raise UserError(
                    f"the argument {argument} is not an input of the dataset{hint}; name the "
                    "arguments of the signature after the features"
                )
        found = {name: known[name] for name in takes}
    if not found:
        raise UserError(
            "the signature has no arguments; add an argument for each feature that the model uses"
        )
    for name, feature in found.items():
        _require_fit(takes[name], feature, spec)
    return found


def _require_fit(argument: Argument, feature: str, spec: DatasetSpec) -> None:
    of_data = spec.features[feature]
    both = (
        f"the argument {argument} does not accept the feature {feature!r} "
        f"({describe_tensor(of_data.dtype, (None, *of_data.shape))})"
    )
    if argument.shape and argument.shape[0] is not None:
        raise UserError(
            f"the argument {argument} accepts exactly {argument.shape[0]} examples; export the "
            "model with None as the first dimension"
        )
    if not _is_castable(of_data.dtype, argument.dtype):
        raise UserError(f"{both}; declare it as {of_data.dtype}, and convert inside the model")
    known = spec.learnt.features.get(feature)
    least, most = (known.least or 0, known.most or 0) if known else (0, 0)
    if _is_narrow(argument.dtype, of_data.dtype, least, most):
        raise UserError(
            f"{both}, whose values range from {least:g} to {most:g}; declare it as {of_data.dtype}"
        )
    if _reshaped(of_data, argument) is None:
        raise UserError(f"{both}; declare it with that shape, and reshape inside the model")


def _is_castable(given: str, wanted: str) -> bool:
    if given == wanted or "string" in (given, wanted):
        return given == wanted
    return wanted == "bfloat16" or bool(np.can_cast(np.dtype(given), np.dtype(wanted), "same_kind"))


def _is_narrow(wanted: str, given: str, least: float, most: float) -> bool:
    if wanted == given or not wanted.startswith(("int", "uint")):
        return False
    limits = np.iinfo(wanted)
    return least < limits.min or most > limits.max


def _reshaped(feature: FeatureSpec, argument: Argument) -> tuple[Size, ...] | None:
    """Return the shape of an example that fits the argument, or None if there is none."""
    given, wanted = tuple(feature.shape), argument.shape
    if wanted is None or _fits(given, wanted[1:]):
        return given
    if None in given:
        return None
    # Try to add or drop a last axis of size 1, or to flatten the array in row-major order.
    flat = (math.prod(feature.sizes),)
    shapes = ((*given, 1), given[:-1] if given[-1:] == (1,) else given, flat)
    return next((each for each in shapes if _fits(each, wanted[1:])), None)


def convert(value: Any, feature: FeatureSpec, argument: Argument) -> Any:
    """Convert a batch of a feature, real or symbolic, to the argument's type and shape."""
    shape = _reshaped(feature, argument)
    if shape is not None and shape != tuple(feature.shape):
        value = keras.ops.reshape(value, (-1, *shape))
    return value if feature.dtype == argument.dtype else keras.ops.cast(value, argument.dtype)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a model that one task uses.

    Attributes:
        name: the name of the output.
        taken: how its values are interpreted: probabilities, logits, or numbers.
        part: the task of this output.
        swap: whether the model treats the other of the two classes as positive.
    """

    name: str
    taken: str
    part: Task
    swap: bool = False

    def convert(self, value: Any) -> Any:
        """Convert a batch of the output, real or symbolic, to the form that the task expects."""
        value = keras.ops.cast(value, "float32")
        wanted, link = self.part.output_shape, self.part.link
        is_pair = _is_pair(self.part, tuple(value.shape)[1:])
        if self.taken == PROBABILITIES and link == "sigmoid" and not is_pair:
            value = keras.ops.clip(value, _SMALLEST, _BELOW_ONE)
            value = keras.ops.log(value) - keras.ops.log1p(-value)
        elif self.taken == PROBABILITIES:
            value = keras.ops.log(keras.ops.clip(value, _SMALLEST, 1.0))
        if is_pair:
            value = value[:, 1:] - value[:, :1]
        elif len(value.shape) <= len(wanted):
            value = keras.ops.expand_dims(value, -1)
        elif len(value.shape) == len(wanted) + _TWO:
            value = keras.ops.squeeze(value, -1)
        mean, std = getattr(self.part, "scale", (0.0, 1.0))
        if (mean, std) != (0.0, 1.0):
            value = (value - mean) / std
        return -value if self.swap else value


def match_outputs(
    task: Task, answers: Mapping[str, Array], said: str, swapped: frozenset[str]
) -> dict[str, Output]:
    """For each output of a task, return the matching output of the model. Raises `UserError`.

    `answers` are the outputs for real examples, by name, and `said` is the value of
    `program.outputs`. `swapped` are the targets whose two classes have the opposite order in the
    dataset that the program read.
    """
    found = {}
    for name, part in task.parts.items():
        output, taken = _choose(name, part, answers, said)
        values = answers[output]
        _require_shape(output, values, part)
        if not taken or taken == NUMBERS:
            taken = _decide(values, part, said)
        swap = bool(part.positive_by) and part.target.name in swapped
        found[name] = Output(name=output, taken=taken, part=part, swap=swap)
    return found


def describe_taken(said: str, described: Mapping[str, Any]) -> list[str]:
    """Return a list with a sentence on how `auto` interpreted the outputs, or an empty list."""
    taken = described.get("program", {}).get("outputs", {}).values()
    found = {PROBABILITIES, LOGITS}.intersection(taken)
    if said != AUTO or not found:
        return []
    return [
        f"The outputs of the program's model were interpreted as {' and '.join(sorted(found))}; "
        "set program.outputs if that is wrong."
    ]


def _choose(name: str, part: Task, answers: Mapping[str, Array], said: str) -> tuple[str, str]:
    """Return the name of the output for a task, and the interpretation that the name implies."""
    prefix = (f"{name}_", f"{layer_name(name)}_") if name else ("",)
    named = {
        output: kind
        for answer, kind in _NAMED.items()
        for output in (f"{each}{answer}" for each in prefix)
        if output in answers
    }
    wanted = said if part.link and said != AUTO else ""
    for kind in (wanted, LOGITS, PROBABILITIES, NUMBERS, ""):
        for output, own in named.items():
            if own == kind:
                return output, own
    for output in (name, layer_name(name), *argument_names([name]).values()) if name else ():
        if output in answers:
            return output, ""
    if not name and len(answers) == 1:
        return next(iter(answers)), ""
    there = ", ".join(
        f"{each!r} ({describe_tensor(values.dtype.name, (None, *values.shape[1:]))})"
        for each, values in sorted(answers.items())
    )
    if name:
        raise UserError(
            f"the model returns {there}, but no output for {name!r}; name each output of the "
            "signature after its target"
        )
    own = "probability" if part.output_shape == (1,) else "probabilities"
    raise UserError(
        f"the model returns {there}, but {part.name} uses only one output; name that output "
        f"{own if part.link else 'prediction'!r} in the signature"
    )


def _require_shape(name: str, values: Array, part: Task) -> None:
    given = values.shape[1:]
    wanted = tuple(None if size < 0 else size for size in part.output_shape)
    said = describe_tensor(values.dtype.name, (None, *given))
    if values.dtype.kind != "f":
        raise UserError(
            f"the output {name!r} is {said}, but {part.name} of {part.target} needs floats; return "
            f"{'a probability for each class' if part.link else 'the numbers'}"
        )
    shapes = (given, (*given, 1), given[:-1] if given[-1:] == (1,) else given)
    if _is_pair(part, given) or any(_fits(shape, wanted) for shape in shapes):
        return
    sizes = ", ".join("any" if size is None else str(size) for size in wanted)
    each = ""
    if part.link and part.labels and len(given) == len(wanted):
        each = f": the label has {len(part.labels)} classes, but the model returns {given[-1]}"
    raise UserError(
        f"the output {name!r} is {said}, but {part.name} of {part.target} needs [any, "
        f"{sizes}]{each}"
    )


def _decide(values: Array, part: Task, said: str) -> str:
    if not part.link:
        return NUMBERS
    if said != AUTO:
        return said
    numbers = values.astype(np.float64)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers <= 1 + _NEARLY).all()):
        return LOGITS
    is_sum = part.link == "softmax" or _is_pair(part, values.shape[1:])
    if is_sum and not np.allclose(numbers.sum(axis=-1), 1, rtol=0, atol=_NEARLY):
        return LOGITS
    return PROBABILITIES


def _is_pair(part: Task, given: tuple[Size, ...]) -> bool:
    """Return whether an output has a column for each of the two classes of a binary task."""
    return part.output_shape == (1,) and bool(part.link) and given == (_TWO,)


def _fits(given: tuple[Size, ...], wanted: tuple[Size, ...]) -> bool:
    return len(given) == len(wanted) and all(
        size is None or size == own for own, size in zip(given, wanted, strict=True)
    )
