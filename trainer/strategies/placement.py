"""The placement of variables on parameter servers.

Variables matched by `cluster.placement` are placed first. The others are placed by size, the
largest first, each on the server with the fewest bytes (Graham 1969, "Bounds on Multiprocessing
Timing Anomalies": within 4/3 of the optimum). A slot of the same shape as its variable is on the
same server.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import Variable
from tensorflow.python.eager import context, executor

from flotilla.trainer.config.cluster import server_number
from flotilla.trainer.embeddings.embedding_table import BEGINS, list_groups
from flotilla.trainer.optimizers.optimizers import fuse
from flotilla.trainer.runtime.errors import ConfigError, describe_out_of_memory, nearest

# Variables of at least this size, in bytes, are not initialized if nothing reads the values.
LARGE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Sized:
    """The path and size of a variable to place. All variables of one `group` share a server."""

    path: str
    bytes: int
    group: str = ""


class Place(NamedTuple):
    """The path of a variable, empty if unknown, and the number of its server."""

    path: str
    server: int


def assign(variables: Sequence[Sized], servers: int, named: Mapping[str, str]) -> list[int]:
    """Return the index of a parameter server for each variable. Raises `ConfigError`.

    `named` maps a glob over paths to a server such as "ps:0". The first matching glob wins.
    """
    check([variable.path for variable in variables], servers, named)
    load = [0] * servers
    units: dict[str | int, list[Sized]] = {}
    for index, variable in enumerate(variables):
        units.setdefault(variable.group or index, []).append(variable)
    weights = {unit: sum(each.bytes for each in held) for unit, held in units.items()}
    chosen: dict[str | int, int] = {}
    for unit, held in units.items():
        fits = (to for glob, to in named.items() if any(fnmatchcase(v.path, glob) for v in held))
        if server := next(fits, ""):
            chosen[unit] = server_number(server)
            load[chosen[unit]] += weights[unit]
    for unit in sorted(units, key=lambda each: -weights[each]):
        if unit not in chosen:
            chosen[unit] = load.index(min(load))
            load[chosen[unit]] += weights[unit]
    return [chosen[variable.group or index] for index, variable in enumerate(variables)]


def choose_places(
    build_model: Callable[[], keras.Model],
    check: Callable[[keras.Model], None],
    servers: int,
    named: Mapping[str, str],
) -> list[Place]:
    """Build a model without large values, pass it to `check`, and return its variables' places."""
    made: list[tf.Variable] = []
    sketched = _replace_attribute(Variable, "_initialize_with_initializer", _initialize_sketch)
    with tf.variable_creator_scope(_recording(made)), sketched:
        sketch = build_model()
        check(sketch)
    paths = {id(variable.value): variable.path for variable in sketch.variables}
    seen = {id(variable) for variable in made}
    if escaped := sorted(path for key, path in paths.items() if key not in seen):
        raise ConfigError(
            f"model: {escaped[0]} cannot be placed on a parameter server; create all layers "
            "anew in each call of the model function, and do not call clear_session in it"
        )
    groups = {id(v): f"{n}" for n, group in enumerate(list_groups(sketch)) for v in group}
    sizes = [
        Sized(path=paths.get(id(v), ""), bytes=_bytes(v), group=groups.get(id(v), "")) for v in made
    ]
    chosen = assign(sizes, servers, named)
    return [Place(each.path, server) for each, server in zip(sizes, chosen, strict=True)]


class KeptValues:
    """Large variables that are not initialized, because servers already hold their values."""

    def __init__(self, servers: Collection[int] = ()) -> None:
        """Store the numbers of the servers that already hold values."""
        self._servers = servers
        self._made: list[tuple[keras.Variable, Any]] = []

    @contextmanager
    def skip_values(self, server: Callable[[], int]) -> Iterator[None]:
        """Skip initial values of large variables. `server` returns the next variable's server."""
        initialize = Variable._initialize_with_initializer

        def initialize_small(variable: Any, initializer: Any) -> None:
            shape, dtype = variable._shape, tf.as_dtype(variable._dtype)
            is_small = math.prod(shape) * dtype.size < LARGE_BYTES
            if is_small or server() not in self._servers:
                initialize(variable, initializer)
                return
            variable._initialize(lambda: tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False))
            self._made.append((variable, initializer))
            # Mark both objects, because `variable.value` may return a cast of `variable._value`.
            for each in (variable, variable._value):
                setattr(each, BEGINS, initializer)

        with _replace_attribute(Variable, "_initialize_with_initializer", initialize_small):
            yield

    def give_others(self, kept: Collection[tf.Variable]) -> None:
        """Initialize the variables that were skipped and are not among `kept`."""
        has_values = {id(each) for each in kept}
        for variable, initializer in self._made:
            if id(variable.value) not in has_values:
                with tf.device(variable.value.device):
                    variable.assign(initializer(variable.shape, dtype=variable.dtype))


NONE_KEPT = KeptValues()


def build_placed_model(
    build_model: Callable[[], keras.Model], places: Sequence[Place], kept: KeptValues = NONE_KEPT
) -> keras.Model:
    """Build a model with each variable at its place. Raises `ConfigError` or `ValueError`."""
    left, more = deque(places), 0

    def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        nonlocal more
        # Do not raise here: the error would seem to come from the user's model function.
        more += not left
        place = left.popleft() if left else Place("", 0)
        with tf.device(server_device(place.server)), _explain_memory(place.path or "a variable"):
            return next_creator(**kwargs)

    with (
        tf.variable_creator_scope(create),
        kept.skip_values(lambda: left[0].server if left else -1),
    ):
        model = build_model()
    if more or left:
        differ = f"{more} more" if more else f"{len(left)} fewer"
        raise ValueError(f"the model has {differ} variables than placements")
    return model


def build_slots(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, kept: KeptValues = NONE_KEPT
) -> None:
    """Create each optimizer slot on the server of its variable, if their shapes are equal."""
    add = optimizer.add_variable_from_reference

    # The argument is named as in Keras, because some optimizers pass it by keyword.
    def create_slot(
        reference_variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        slot = f"a slot of {reference_variable.path}"
        device = reference_variable.value.device
        server = tf.DeviceSpec.from_string(device).task
        with tf.device(device), _explain_memory(slot), kept.skip_values(lambda: server):
            return add(reference_variable, *args, **kwargs)

    # Other slots, such as Adafactor's factors, are placed on the server of the step counter.
    with (
        _replace_attribute(optimizer, "add_variable_from_reference", create_slot),
        tf.device(optimizer.iterations.value.device),
    ):
        optimizer.build(model.trainable_variables)
    fuse(optimizer)
    _update_on_servers(optimizer)


def _update_on_servers(optimizer: keras.optimizers.Optimizer) -> None:
    update, decay = optimizer.update_step, optimizer._apply_weight_decay
    rate = optimizer._get_current_learning_rate

    def current_learning_rate() -> Any:
        # A schedule reads the step counter. On another machine, each read would take two messages.
        with tf.device(optimizer.iterations.value.device):
            return rate()

    def update_step(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        with tf.device(variable.device):
            update(gradient, variable, learning_rate)

    def apply_weight_decay(variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            with tf.device(variable.value.device):
                decay([variable])

    optimizer._get_current_learning_rate = current_learning_rate
    optimizer.update_step = update_step
    optimizer._apply_weight_decay = apply_weight_decay


def is_of_keras(each: object) -> bool:
    """Return whether the class of an object comes from Keras or this package, not from a user."""
    return type(each).__module__.partition(".")[0] in {"keras", "flotilla"}


def server_device(index: int) -> str:
    """Return the TensorFlow device name of a parameter server's CPU."""
    return f"/job:ps/task:{index}/device:CPU:0"


def worker_device(index: int) -> str:
    """Return the TensorFlow device name of a worker's CPU."""
    return f"/job:worker/replica:0/task:{index}/device:CPU:0"


@contextmanager
def _explain_memory(what: str) -> Iterator[None]:
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if line := describe_out_of_memory(error, what):
            raise ConfigError(line) from None
        raise


def optimize_once() -> None:
    """Make TensorFlow optimize each graph of this process once instead of twice.

    The second pass took half a second on each worker at every restart and made no step faster. The
    MLIR pass and, without a GPU, the memory pass made no step faster either, so they are disabled.
    """
    here = context.context()
    options = here.config
    passes = options.graph_options.rewrite_options
    passes.meta_optimizer_iterations = passes.ONE
    passes.disable_tfg_optimizer = True
    if not tf.config.list_logical_devices("GPU"):
        passes.memory_optimization = passes.NO_MEM_OPT
    here._config = options
    # Discard the options that this thread has cached.
    here.function_call_options = None


@contextmanager
def run_separately() -> Iterator[None]:
    """Run operations outside of the executor that all threads share.

    If an operation in the shared executor fails, TensorFlow aborts all others, on any server.
    """
    own = executor.new_executor(enable_async=False, enable_streaming_enqueue=False)
    try:
        with context.executor_scope(own):
            yield
    finally:
        # Otherwise TensorFlow raises a server's error again when it deletes the executor.
        own.clear_error()


@contextmanager
def run_on_device(device: str) -> Iterator[None]:
    """Run operations on a device, outside of the executor that all threads share."""
    with run_separately(), tf.device(device):
        yield


def fetch_value(value: tf.Tensor) -> Any:
    """Return the value of an eager tensor, which may be on a server.

    TensorFlow 2.21 leaks about 3 KB on a server for each tensor that `numpy` copies from it. It
    leaks nothing if an operation of this task copies the tensor first.
    """
    return tf.identity(value).numpy()


def _recording(made: list[tf.Variable]) -> Callable[..., tf.Variable]:
    def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        made.append(next_creator(**{**kwargs, "initial_value": _sketch_value(kwargs)}))
        return made[-1]

    return create


def _initialize_sketch(variable: Any, initializer: Any) -> None:
    """Initialize a Keras variable of a model built only for placement, without tracing."""
    shape, dtype = variable._shape, tf.as_dtype(variable._dtype)
    if math.prod(shape) * dtype.size < LARGE_BYTES:
        variable._initialize(initializer(shape, dtype=variable._dtype))
    else:
        variable._initialize(tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False))


def _sketch_value(kwargs: dict[str, Any]) -> Any:
    """Return an initial value for a variable of a model that is built only for placement.

    A large value is never read and might not fit on this machine, so it takes no memory.
    """
    initial = kwargs.get("initial_value")
    if not callable(initial):
        return initial
    try:
        traced = tf.function(initial, autograph=False).get_concrete_function().outputs[0]
    # A user's initializer may work only outside of a graph.
    except Exception:
        return initial
    count = traced.shape.num_elements()
    if count is None or count * traced.dtype.size < LARGE_BYTES:
        return initial
    shape, dtype = traced.shape.as_list(), traced.dtype
    return lambda: tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)


@contextmanager
def _replace_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _bytes(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def check(paths: Sequence[str], servers: int, named: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a server in `named` does not exist or a glob matches no path."""
    for glob, name in named.items():
        if not 0 <= server_number(name) < servers:
            raise ConfigError(
                f"cluster.placement: {glob!r} is placed on {name!r}; it must be ps:0 to "
                f"ps:{servers - 1}"
            )
        if not any(fnmatchcase(path, glob) for path in paths):
            raise ConfigError(
                f"cluster.placement: {glob!r} matches no variable{nearest(glob, paths)}"
            )
