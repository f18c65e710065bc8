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
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from trainer.strategies.placement import operating_at
from trainer.strategies.remade import with_data, with_name
from trainer.strategies.turns import TURNS

log = logging.getLogger(__name__)
# In what variables are called that each chief makes itself: they have no name on a server.
CONFIGURED = "configured/"
# They look for a function in the process that traced them.
_OF_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
# That differ between two chiefs of a run on their own.
_OF_A_PROCESS = {"HOSTNAME", "TF_CONFIG"}
Handles = Mapping[str, tf.Tensor]


class LeftGraphs:
    """The graph that an earlier chief has left, and the one that this one leaves."""

    def __init__(self, config: Config, left: LeftVariables | None, devices: Sequence[str]) -> None:
        """Look for one of this configuration, and of the same code, before the model is built.

        Args:
            config: of the run.
            left: what is on the servers; without it nothing is left.
            devices: of each worker.
        """
        self._left, self._is_left = left, set[int]()
        self._described = [config.digest(), *devices]
        # The code loads more of itself as the model is built.
        self._first_key = self._key = self._key_now() if left else ""
        self._found = self._read(left.found_graph) if left and left.found_graph else None

    def beforehand(self) -> tuple[int, Any] | None:
        """Return the number and the function of the graph that is left, if any.

        With it workers get the graph ready while the model is built, by a closure of `NO_TURN`. It
        has stand-ins in the place of what was captured. See `handed_out`.
        """
        if not (found := self._found):
            return None
        try:
            found.bind(_stand_ins(found.captured))
        # Whatever it is, training goes on without; a task that is lost is missed again.
        except Exception as error:
            self._refuse(error)
            return None
        return found.number, found.function

    def wait(self, wait: Callable[[], bool]) -> None:
        """Wait until workers have got ready what was sent `beforehand`.

        Where they fail it is not used. `wait` returns whether they ended in time.
        """
        try:
            if self._found and wait():
                self._found.free()
        # As above.
        except Exception as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Do not use what is left, as `error` says why not."""
        log.warning("the graph that a chief has left is not used: %s", user_code.line_of(error))
        self._found = None

    def handed_out(self, handles: Callable[[], Handles]) -> dict[int, Any]:
        """Return the function of the graph that is left by its number, or nothing.

        To be called once the model is built. `handles` returns those of what each chief has on the
        servers, by what they are.
        """
        if not self._left:
            return {}
        self._key, found = self._key_now(), self._found
        # Its stand-ins are not made again with a server.
        self._found = None
        if not found or found.key != self._key:
            return {}
        try:
            found.bind(handles())
        # Whatever it is, training goes on without.
        except Exception as error:
            self._refuse(error)
            return {}
        log.info("workers go on with the graph that the chief before has traced")
        self._found = found
        return {found.number: found.function}

    def leave(self, number: int, function: Any, handles: Callable[[], Handles]) -> None:
        """Leave a graph once workers have run it, the first time that this is called for it.

        Args:
            number: of the graph.
            function: the `tf.function`.
            handles: returns what `handed_out` takes.

        Raises:
            OpError: of TensorFlow, where a server is gone.
        """
        if not self._left or number in self._is_left:
            return
        self._is_left.add(number)
        if self._found and function is self._found.function:
            self._left.leave_graph(self._left.found_graph)
            return
        try:
            data = self._data_of(number, function, handles())
        # Whatever it is, training goes on without.
        except Exception as error:
            log.warning("the next chief traces anew: %s", user_code.line_of(error))
            return
        if data:
            self._left.leave_graph(data)
        else:
            log.info("the next chief traces anew: the graph needs what another one does not have")

    def _data_of(self, number: int, function: Any, handles: Handles) -> bytes | None:
        # The code may have loaded more of itself meanwhile, which another chief has not by then.
        if not self._key or self._key_now() != self._key:
            return None
        (traced,) = function._list_all_concrete_functions()
        return _described(traced, (self._first_key, self._key, number), handles)

    def _read(self, data: bytes) -> _Left | None:
        try:
            described, _, library = data.partition(b"\n")
            first_key, key, number, captured = json.loads(described)
            if not first_key or first_key != self._first_key:
                return None
            return _Left(key, number, [_Captured(**each) for each in captured], library)
        # Whatever it is, training goes on without.
        except Exception as error:
            self._refuse(error)
            return None

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


@dataclass(frozen=True, kw_only=True)
class _Captured:
    """What a graph has captured: what it is, where, and of a variable shape and type."""

    name: str
    device: str
    shape: Sequence[int] | None = None
    dtype: str = ""


class _Left:
    """A graph that was left, and as a function that calls it with other handles."""

    def __init__(
        self, key: str, number: int, captured: Sequence[_Captured], library: bytes
    ) -> None:
        self.key, self.number, self.captured = key, number, captured
        functions = FunctionDefLibrary.FromString(library).function
        # What this chief traces itself is numbered as what the first one has traced.
        prefix = f"left_{hashlib.sha256(library).hexdigest()[:16]}_"
        for each in functions:
            for called in _called(each):
                called.name = prefix + called.name
            each.signature.name = prefix + each.signature.name
            if not context.context().has_function(each.signature.name):
                context.context().add_function_def(each)
        self._signature = functions[0].signature
        self._handles: Sequence[tf.Tensor] = ()
        self.function = tf.function(self._call, autograph=False)

    def free(self) -> None:
        """Free the memory of stand-ins, which nobody uses any more."""
        for each, handle in zip(self.captured, self._handles, strict=False):
            if each.name.startswith(TURNS):
                with operating_at(each.device):
                    tf.raw_ops.DestroyResourceOp(resource=handle)

    def bind(self, handles: Handles) -> None:
        """Call it with these from now on."""
        given = [handles[each.name] for each in self.captured]
        instead = {id(old): new for old, new in zip(self._handles, given, strict=False)}
        for traced in self.function._list_all_concrete_functions():
            traced.set_external_captures([instead[id(each)] for each in traced._captured_inputs])
        self._handles = given

    def _call(self, *arguments: Any) -> tf.Tensor:
        flat = tf.nest.flatten(arguments, expand_composites=True)
        if len(flat) + len(self._handles) != len(self._signature.input_arg):
            raise ValueError("it has other arguments")
        (result,) = tf.raw_ops.StatefulPartitionedCall(
            args=[*flat, *self._handles],
            Tout=[each.type for each in self._signature.output_arg],
            f=NameAttrList(name=self._signature.name),
        )
        return result


def _stand_ins(captured: Sequence[_Captured]) -> dict[str, tf.Tensor]:
    """Return handles in the place of what was captured: only turns have values, which are zeros."""
    made, prefix = dict[str, tf.Tensor](), f"stands-in-{secrets.token_hex(8)}-"
    for device in {each.device for each in captured}:
        # Made as what they stand for (`LeftVariables`): of a handle that no function has returned
        # TensorFlow knows shape and type, and a graph that is ready is so for what is known.
        own, named = list[_Captured](), list[_Captured]()
        for each in captured:
            if each.device == device:
                (own if each.name.startswith(CONFIGURED) else named).append(each)
        with operating_at(device):
            handles = tf.function(partial(_standing_in, named, prefix), autograph=False)()
        for each, handle in zip(named, handles, strict=True):
            of = each.shape, tf.as_dtype(each.dtype or "resource")
            made[each.name] = handle if each.shape is None else with_data(handle, *of)
        for each in own:
            of = each.shape, tf.as_dtype(each.dtype)
            made[each.name] = with_name(*of, device, prefix + each.name).handle
    return made


def _standing_in(captured: Sequence[_Captured], prefix: str) -> list[tf.Tensor]:
    made = []
    for each in captured:
        if each.shape is None:
            made.append(tf.raw_ops.MutexV2(shared_name="stands-in"))
            continue
        shape, dtype, name = each.shape, tf.as_dtype(each.dtype), prefix + each.name
        made.append(tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=name))
        if each.name.startswith(TURNS):
            tf.raw_ops.AssignVariableOp(resource=made[-1], value=tf.zeros(shape, dtype))
    return made


def _described(
    traced: ConcreteFunction, key: tuple[str, str, int], handles: Handles
) -> bytes | None:
    """Return a graph as `_Left` reads it; None where another chief could not call it."""
    names = {id(handle): name for name, handle in handles.items()}
    captured = []
    for each in traced.captured_inputs:
        if id(each) not in names:
            return None
        known: dict[str, Any] = {"name": names[id(each)], "device": each.device}
        data = getattr(each, "_handle_data", None)
        for of in data.shape_and_type if data else ():
            known["shape"] = tf.TensorShape(of.shape).as_list()
            known["dtype"] = tf.as_dtype(of.dtype).name
        captured.append(known)
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
