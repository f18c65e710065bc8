"""Creates a model by name or with a user's `package.module:function`, and freezes variables.

A frozen variable has no gradient and no optimizer slots, and workers do not push it. It is read,
saved and exported like other variables. Keras's `trainable` flags, which all strategies read,
define which variables are frozen.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils.naming import reset_uids

from flotilla.trainer.config.model import MODELS, ModelConfig
from flotilla.trainer.features.names import layer_name
from flotilla.trainer.models.keras_file import inputs_by_feature
from flotilla.trainer.models.preprocessing import Normalization, Vocabulary, Words
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError, describe_out_of_memory, nearest

# Parts of Keras's error messages about unknown classes and functions, and about duplicate names.
_UNKNOWN = re.compile(r"Could not locate (?:class|function) '(\w+)'")
_TWICE = re.compile(r'The name "([^"]+)" is used \d+ times in the model')
_NAMED = 6
_ASSERTION = re.compile(r"assertion failed: \[([^]]*)\]((?: \[[^]]*\])*)")


@contextmanager
def report_bad_input() -> Iterator[None]:
    """Convert a failed assertion in a model's graph, on any machine, to a `UserError`.

    TensorFlow's own message repeats the assertion, with the stack traces of all tasks.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _ASSERTION.search(str(error))
        if not found:
            raise
        words = " ".join([found[1], *re.findall(r"\[([^]]*)\]", found[2])])
        place = user_code.find_place(error)
        where = f" ({place})" if place else ""
        raise UserError(f"the model does not accept its input: {words}{where}") from error


ModelFunction = Callable[..., keras.Model]
# A function that checks the built model and its symbolic outputs. It may raise `ConfigError`.
Check = Callable[[keras.Model, Any], None]


def build(
    config: ModelConfig, spec: InputSpec, seed: int, check: Check = lambda _model, _outputs: None
) -> keras.Model:
    """Create and build the model. `check` raises an error if the output does not fit the task.

    The same config, spec and seed give the same variable paths and weights, even if other models
    have been created in this process, because Keras's name counters and random seeds are reset. The
    variables are created in the current `tf.distribute` strategy scope, if there is one.

    Raises:
        ConfigError: the function does not exist, its arguments are invalid, or its result is not a
            suitable model.
    """
    function = _function(config.name)
    given = [*inspect.signature(function).parameters][:1]
    if not given:
        place = user_code.place_of_definition(function)
        raise ConfigError(
            f"model {config.name}: the function accepts no argument{place}; its first argument "
            f"must be the `InputSpec`"
        )
    user_code.require_arguments("model", config.name, function, config.args, given)
    try:
        try:
            model = _build(function, spec, config.args, seed)
        except ValueError as error:
            # Prefix the input layers if a column has the same name as a layer of the model.
            if not _is_input_clash(error, spec):
                raise
            spec = replace(spec, inputs_apart=True)
            model = _build(function, spec, config.args, seed)
    except ConfigError as error:
        raise ConfigError(f"model {config.name}: {error}") from None
    # A user's function may raise any exception.
    except (Exception, SystemExit) as error:
        line = describe_out_of_memory(error) or user_code.format_error(error)
        raise ConfigError(f"model {config.name}: {line}") from error
    model = _name_outputs(model, spec)
    _check_output(config.name, model, spec, check)
    paths = [variable.path for variable in model.variables]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ConfigError(
            f"model {config.name}: two variables are called {twice[0]}; give layers different "
            "names, because checkpoints identify variables by name"
        )
    return model


def _build(
    function: ModelFunction, spec: InputSpec, args: Mapping[str, Any], seed: int
) -> keras.Model:
    # `keras.backend.clear_session` would also reset names, but it breaks an open strategy scope.
    reset_uids()
    keras.utils.set_random_seed(seed)
    return function(spec, **args)


def _is_input_clash(error: ValueError, spec: InputSpec) -> bool:
    twice = _TWICE.search(str(error))
    several = isinstance(spec.shape, Mapping) and not spec.inputs_apart
    return bool(several and twice and twice[1] in map(layer_name, spec.names))


def _name_outputs(model: Any, spec: InputSpec) -> Any:
    """Convert a model with a list of outputs to one with a mapping by target name.

    A model is returned unchanged if it is compiled or an instance of a subclass.
    """
    names = list(spec.output_shape) if isinstance(spec.output_shape, Mapping) else []
    plain = type(model).__name__ == "Functional" and not model.compiled
    if not plain or not isinstance(model.output, list) or len(model.output) != len(names):
        return model
    outputs = dict(zip(names, model.output, strict=True))
    return keras.Model(model.input, outputs, name=model.name)


def require_compilable(model: keras.Model) -> None:
    """Raise `ConfigError` if XLA cannot compile a layer of the model."""
    if layers := [layer for layer in model._flatten_layers() if not layer.supports_jit]:
        named = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers)
        raise ConfigError(f"training.jit_compile: XLA cannot compile {named}; set it to false")


def require_trainable(name: str, model: keras.Model) -> None:
    """Raise `ConfigError` if no variable of the model is trainable."""
    if not model.trainable_variables:
        frozen = "all variables are frozen, by layers or by training.freeze"
        why = frozen if model.variables else "the model has no variables"
        raise ConfigError(f"model {name}: nothing can be trained, because {why}")


def require_lite(model: keras.Model) -> None:
    """Raise `ConfigError` if TensorFlow Lite does not support a layer of this package."""
    for layer in model._flatten_layers():
        why = ""
        if isinstance(layer, Vocabulary | Words):
            why = f"string operations, which {layer.name} needs to look up known texts"
        elif isinstance(layer, Normalization) and layer.is_double:
            why = (
                f"float64 arithmetic, which {layer.name} needs to keep the digits of times and "
                "large numbers"
            )
        if why:
            raise ConfigError(
                f"export.formats: TensorFlow Lite does not support {why}; remove tflite, or drop "
                "the column"
            )


def require_readable(name: str, model: keras.Model) -> None:
    """Raise `ConfigError` if Keras could not load the model from a `.keras` file.

    Keras cannot load `Lambda` layers, for example, or a user's layers without `get_config`. The
    check writes no file. It creates a copy of the model without values.
    """
    with ThreadPoolExecutor(1) as pool:
        unreadable = pool.submit(_unreadable, model).result()
    if unreadable:
        lacking = _UNKNOWN.search(unreadable)
        if lacking:
            raise ConfigError(
                f"model {name}: {unreadable}; decorate {lacking[1]} with "
                "@keras.saving.register_keras_serializable(), or leave keras out of export.formats"
            )
        raise ConfigError(
            f"model {name}: {unreadable}; define get_config in your own classes, replace a Lambda "
            "with a custom layer, or leave keras out of export.formats"
        )


def _unreadable(model: keras.Model) -> str:
    # Do not exit the scope, because the exit would initialize the variables of all copies.
    keras.StatelessScope().__enter__()
    for part in (*model.layers, model):
        try:
            tree = keras.saving.serialize_keras_object(part)
            with inputs_by_feature():
                keras.saving.deserialize_keras_object(tree, safe_mode=True)
        # A user's layers may raise any exception.
        except Exception as error:
            # Keras's message begins with the errors of enclosing objects. Find the specific error.
            lacking = _UNKNOWN.search(str(error))
            words = lacking[0] if lacking else user_code.short_message(error).partition(". ")[0]
            what = "the model" if part is model else f"layer {part.name} ({type(part).__name__})"
            return f"{what} cannot be saved as .keras and loaded again: {words}"
    return ""


def _function(name: str) -> ModelFunction:
    found = user_code.find_function(f"model {name}", MODELS.get(name, name))
    if isinstance(found, keras.Model):
        raise ConfigError(f"model {name} is a Keras model, not a function that returns one")
    return found


def _check_output(name: str, model: object, spec: InputSpec, check: Check) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model {name} is a {type(model).__name__}, not a keras.Model")
    try:
        # The call also builds a model that has not been called yet.
        outputs = model(spec.symbols())
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"model {name} does not accept {_inputs(spec)}: {user_code.format_error(error)}"
        ) from error
    if keras.tree.is_nested(outputs) and not isinstance(spec.output_shape, Mapping):
        names = f" ({', '.join(map(repr, outputs))})" if isinstance(outputs, Mapping) else ""
        raise ConfigError(
            f"model {name}: the output is a {type(outputs).__name__}{names}, but the task has one "
            "output; return the tensor itself"
        )
    try:
        check(model, outputs)
    except ConfigError as error:
        raise ConfigError(f"model {name}: {error}") from None


def _inputs(spec: InputSpec) -> str:
    if not isinstance(spec.shape, Mapping):
        return f"the dataset's input of shape {spec.shape} and type {spec.dtype}"
    some = [f"{name} ({spec.dtype[name]} {shape})" for name, shape in spec.shape.items()]  # type: ignore[index]
    more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
    return f"the dataset's inputs, a mapping of {', '.join(some[:_NAMED])}{more}"


def freeze(model: keras.Model, globs: Sequence[str]) -> None:
    """Freeze the variables of a built model whose paths match a glob.

    If all variables of a layer match, `layer.trainable` is set to False. This is the only way to
    keep the moving statistics of a BatchNormalization unchanged.

    Raises:
        ConfigError: a glob matches no variable, or no variable that can be frozen.
    """
    paths = [variable.path for variable in model.variables]
    for glob in globs:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise ConfigError(
                f"training.freeze: {glob!r} matches no variable{nearest(glob, paths)}"
            )
    frozen = {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)}
    moving = dict[str, str]()
    for layer in model._flatten_layers():
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if own and not layer._layers and frozen.issuperset(each.path for each in own):
            layer.trainable = False
            continue
        for variable in layer._trainable_variables:
            if variable.path in frozen:
                variable.trainable = False
        if layer.trainable:
            moving |= {each.path: layer.path for each in layer._non_trainable_variables}
    for glob in globs:
        fits = [path for path in paths if fnmatchcase(path, glob)]
        if moving.keys() >= set(fits):
            raise ConfigError(
                f"training.freeze: {glob!r} matches only {fits[0]}, which gradients do not "
                f"train; to keep it unchanged, freeze its whole layer: '{moving[fits[0]]}/*'"
            )
