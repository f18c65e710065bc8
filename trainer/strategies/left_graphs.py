"""The graph of the workers' steps, which outlives a chief: the next one does not trace it again.

Workers do nothing while a chief traces the steps of a model, for a second or more. For each chief
of a run the graph is the same, but for the handles of what is on the servers, and these have names
(`LeftVariables`). So a chief leaves its graph on `ps-0` with the names of what it has captured. The
next one calls it with handles of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import NameAttrList
from tensorflow.core.framework.function_pb2 import FunctionDef, FunctionDefLibrary
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

import trainer
from trainer import user_code
from trainer.config.schema import Config
from trainer.strategies.left_variables import LeftVariables

log = logging.getLogger(__name__)
# They look for a function in the process that traced them.
_OF_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
# What the functions of an earlier chief are called here.
_PREFIX = "left_"
# That differ between two chiefs of a run on their own.
_OF_A_PROCESS = {"HOSTNAME", "TF_CONFIG"}
Handles = Mapping[str, tf.Tensor]


class LeftGraphs:
    """The graph that an earlier chief has left, and the one that this one leaves."""

    def __init__(
        self,
        config: Config,
        left: LeftVariables | None,
        handles: Callable[[], Handles],
        devices: Sequence[str],
    ) -> None:
        """Look for one of this configuration, and of the same code.

        Args:
            config: of the run.
            left: what is on the servers; without it nothing is left.
            handles: returns those of what each chief has on the servers, by what they are.
            devices: of each worker.
        """
        self._left, self._handles = left, handles
        self._described = [config.digest(), *devices]
        self._key = self._key_now() if left else ""
        # The number of the graph that was traced last, and is not left yet.
        self._new: int | None = None

    def called(self, number: int, *arguments: Any) -> tf.Tensor | None:
        """Call the graph of this number, where it is left; return its result.

        To be called where this graph is traced otherwise.
        """
        self._new = number
        if not (self._left and self._left.found_graph and self._key):
            return None
        try:
            found = _Left.of(self._left.found_graph, (self._key, number), self._handles())
            result = found(arguments) if found else None
        # Whatever it is, training goes on without.
        except Exception as error:
            log.warning("the graph that a chief has left is not used: %s", user_code.line_of(error))
            return None
        if found:
            log.info("workers go on with the graph that the chief before has traced")
        return result

    def leave(self, functions: Mapping[int, Any]) -> None:
        """Leave the graph that was traced last, once workers have run it.

        Args:
            functions: the `tf.function` of each number.

        Raises:
            OpError: of TensorFlow, where a server is gone.
        """
        if self._new is None or not self._left:
            return
        number, self._new = self._new, None
        try:
            data = self._data_of(number, functions[number])
        # Whatever it is, training goes on without.
        except Exception as error:
            log.warning("the next chief traces anew: %s", user_code.line_of(error))
            return
        if data:
            self._left.leave_graph(data)
        else:
            log.info("the next chief traces anew: the graph needs what another one does not have")

    def _data_of(self, number: int, function: Any) -> bytes | None:
        (traced,) = function._list_all_concrete_functions()
        if self._left and _calls_left(traced):
            # As it was found.
            return self._left.found_graph
        # The code may have loaded more of itself meanwhile, which another chief has not by then.
        if not self._key or self._key_now() != self._key:
            return None
        return _described(traced, (self._key, number), self._handles())

    def _key_now(self) -> str:
        """Return what is another one where a graph may be: of configuration, devices and code."""
        own = Path(trainer.__file__).parent
        try:
            files = [
                (str(each.relative_to(own)), hashlib.sha256(each.read_bytes()).hexdigest())
                for each in sorted(own.rglob("*.py"))
            ]
        except OSError as error:
            log.warning("the next chief traces anew: %s", user_code.line_of(error))
            return ""
        text = [
            self._described,
            [tf.__version__, keras.__version__, user_code.loaded_digest()],
            files,
            {name: each for name, each in os.environ.items() if name not in _OF_A_PROCESS},
        ]
        return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


class _Left:
    """A graph that was left."""

    def __init__(self, library: bytes, captured: list[tf.Tensor]) -> None:
        functions = FunctionDefLibrary.FromString(library).function
        # What this chief traces itself is numbered as what the first one has traced.
        prefix = f"{_PREFIX}{hashlib.sha256(library).hexdigest()[:16]}_"
        for each in functions:
            for called in _called(each):
                called.name = prefix + called.name
            each.signature.name = prefix + each.signature.name
            if not context.context().has_function(each.signature.name):
                context.context().add_function_def(each)
        self._signature, self._captured = functions[0].signature, captured

    @classmethod
    def of(cls, data: bytes, wanted: tuple[str, int], handles: Handles) -> _Left | None:
        described, _, library = data.partition(b"\n")
        *found, captured = json.loads(described)
        if found != [*wanted]:
            return None
        return cls(library, [handles[each] for each in captured])

    def __call__(self, arguments: Any) -> tf.Tensor:
        flat = tf.nest.flatten(arguments, expand_composites=True)
        if len(flat) + len(self._captured) != len(self._signature.input_arg):
            raise ValueError("it has other arguments")
        (result,) = tf.raw_ops.StatefulPartitionedCall(
            args=[*flat, *self._captured],
            Tout=[each.type for each in self._signature.output_arg],
            f=NameAttrList(name=self._signature.name),
        )
        return result


def _described(traced: ConcreteFunction, key: tuple[str, int], handles: Handles) -> bytes | None:
    """Return a graph as `_Left` reads it; None where another chief could not call it."""
    names = {id(handle): name for name, handle in handles.items()}
    captured = [names.get(id(each)) for each in traced.captured_inputs]
    if None in captured:
        return None
    functions = list(_functions(traced))
    if any(node.op in _OF_PYTHON for each in functions for node in each.node_def):
        return None
    library = FunctionDefLibrary(function=functions).SerializeToString()
    return json.dumps([*key, captured]).encode() + b"\n" + bytes(library)


def _functions(traced: ConcreteFunction) -> Iterator[FunctionDef]:
    """Yield a function, and those that it calls."""
    names, seen = [traced.function_def.signature.name], set[str]()
    while names:
        if (name := names.pop(0)) not in seen:
            seen.add(name)
            found = context.context().get_function_def(name)
            yield found
            names += [each.name for each in _called(found)]


def _called(function: FunctionDef) -> Iterator[NameAttrList]:
    for node in function.node_def:
        for attribute in node.attr.values():
            if attribute.HasField("func"):
                yield attribute.func
            yield from attribute.list.func


def _calls_left(traced: ConcreteFunction) -> bool:
    return any(each.name.startswith(_PREFIX) for each in _called(traced.function_def))
