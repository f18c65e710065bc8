"""The user's modules: how Python finds them, and where they raised an error.

In every process, the folder of the command is searched last, so that a file `json.py` in it hides
no other module. A code bundle is searched earlier. See `_Finder`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, cast

from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.runtime.masking import COLOURS

FOLDER_VARIABLE = "FLOTILLA_USER_FOLDER"
# The variable with the URI of the code bundle in the user's folder, if the run has one.
BUNDLE_VARIABLE = "FLOTILLA_CODE"
_OWN = {"flotilla"}
_LIBRARIES = (
    f"{Path(__file__).parents[2]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")),
)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_INSTALLED = {"site-packages", "dist-packages"}
# These files do not count as the user's. They contain code that TensorFlow generates from the
# user's functions, where the stack of a graph node starts, or the source of a KFP component.
_GENERATED = re.compile(r"__autograph_generated_file|/ephemeral_component\.py$")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
# Keras and TensorFlow put text before the error's message, and sometimes after it.
_WRAPPED = re.compile(r"Exception encountered when calling [^\n]*\n\s*(\S[^\n]*)")
_WITHIN = re.compile(r"Error encountered:\n\s*(\S[^\n]*)")
_GRAPH = re.compile(r"Graph execution error:.*\n\n([^\n]+)(?:\n\t| \[Op:|$)", re.DOTALL)
# TensorFlow prints this if the graph was traced in another process.
_NO_STACK = re.compile(r"Detected at node [^\n]*:\n<stack traces unavailable>\n\n?")
_MAX_TRACEBACK = 12_000
# A frame of a printed traceback: file, line, function and source line.
_PRINTED = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)\n +(\S[^\n]*)')
_imported: set[str] = set()


def folder() -> str:
    """Return the folder of the user's modules, which is the working folder of the command."""
    return os.environ.get(FOLDER_VARIABLE) or os.getcwd()


def bundle() -> str:
    """Return the URI of the code bundle in the user's folder, or an empty string."""
    return os.environ.get(BUNDLE_VARIABLE, "")


def environment() -> dict[str, str]:
    """Return the environment variables with which a child process finds the same modules."""
    return {"PYTHONSAFEPATH": "1", FOLDER_VARIABLE: folder(), BUNDLE_VARIABLE: bundle()}


def import_module(name: str) -> ModuleType:
    """Import a module that the configuration names. Errors of its code are not caught."""
    _look_into_folder()
    top = name.partition(".")[0]
    if top not in _OWN and top not in sys.stdlib_module_names:
        _imported.add(top)
    return importlib.import_module(name)


def _look_into_folder() -> None:
    there = {finder.of_bundle for finder in sys.meta_path if isinstance(finder, _Finder)}
    if False not in there:
        sys.meta_path.append(_Finder(of_bundle=False))
    if bundle() and True not in there:
        sys.meta_path.insert(0, _Finder(of_bundle=True))


def import_named(what: str, name: str) -> ModuleType:
    """Import the module that the key `what` of the configuration names. Raises `ConfigError`."""
    try:
        return import_module(name)
    # A user's module may raise any exception on import.
    except (Exception, SystemExit) as error:
        message = f"{what}: cannot import {name}: {format_error(error)}{_remedy(name, error)}"
        raise ConfigError(message) from error


def _remedy(name: str, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return ""
    lacking = error.name or name
    if name.endswith(".py"):
        return f"; write the name without .py: {name.removesuffix('.py')}"
    where = "the folder of --code" if bundle() else folder()
    # A missing module other than the named one is probably a package, not a user's file.
    install = "" if f"{name}.".startswith(f"{lacking}.") else "install it, or "
    return f"; {hidden(lacking) or f'{install}put it in {where} or on PYTHONPATH'}"


def hidden(name: str) -> str:
    """Explain why a user's module cannot have this name, or return an empty string if it can."""
    top = name.partition(".")[0]
    if top not in _OWN and top not in sys.stdlib_module_names:
        return ""
    owner = "Flotilla" if top in _OWN else "Python"
    return f"{owner} has a module with the name {top}; rename your module"


def format_error(error: BaseException) -> str:
    """Return an error in one line, such as `ValueError: bad shape (blocks.py:14)`."""
    name, text, place = type(error).__name__, short_message(error), find_place(error)
    return f"{name}{f': {text}' if text != name else ''}{f' ({place})' if place else ''}"


def full_message(error: BaseException) -> str:
    """Return the full message of an error, without color codes and notes on missing stacks."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return _NO_STACK.sub("", COLOURS.sub("", text))


def short_message(error: BaseException) -> str:
    """Return the message of an error in one line, without text added by Keras and TensorFlow."""
    text = full_message(error)
    if wrapped := _WITHIN.search(text) or _WRAPPED.search(text) or _GRAPH.search(text):
        return wrapped[1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # TensorFlow prints the stack first, and the error with its type last.
    return lines[-1].removeprefix(f"{type(error).__name__}: ") if _FRAME.search(text) else lines[0]


def find_place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame in the user's code, or an empty string."""
    frames = next(filter(None, map(_frames, _chain(error))), [])
    return _short_path(*frames[-1]) if frames else ""


def find_traceback(error: BaseException) -> str:
    """Return the traceback of an error or its cause in the user's code, or an empty string."""
    if isinstance(error, UserError):
        cause = error.__cause__
        return error.traceback or (find_traceback(cause) if cause else "")
    if not find_place(error):
        return ""
    # If the error itself was raised in the user's code, its cause adds nothing.
    lines = traceback.format_exception(error, chain=not _frames(error))
    text = COLOURS.sub("", "".join(lines))
    if len(text) > _MAX_TRACEBACK:
        text = f"{lines[0]}  ...\n{text[-_MAX_TRACEBACK:]}"
    return text


def innermost_frame(trace: str) -> str:
    """Return the innermost frame of the user's code in a traceback, or an empty string.

    Example: `blocks.py:14 in call: return inputs @ kernel`.
    """
    for file, line, function, code in reversed(_PRINTED.findall(trace)):
        if is_users_file(file):
            return f"{_short_path(file, int(line))} in {function}: {code}"
    return ""


def find_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames and lines of an error, down to the innermost frame of the user's code.

    If the user's code has no frame, return all frames of the original error.
    """
    for each in _chain(error):
        found = list(traceback.walk_tb(each.__traceback__))
        own = [number for number, (frame, _) in enumerate(found) if _is_users(frame)]
        if own:
            return found[: own[-1] + 1]
    innermost = [each for each in _chain(error) if each.__traceback__]
    return list(traceback.walk_tb(innermost[-1].__traceback__)) if innermost else []


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _frames(error: BaseException) -> list[tuple[str, int]]:
    if isinstance(error, SyntaxError) and error.filename and is_users_file(error.filename):
        return [(error.filename, error.lineno or 0)]
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_users(frame)
    ]
    in_text = ((file, int(line)) for file, line in _FRAME.findall(str(error)))
    return frames or [(file, line) for file, line in in_text if is_users_file(file)]


def _is_users(frame: FrameType) -> bool:
    return is_users_file(frame.f_code.co_filename, str(frame.f_globals.get("__name__")))


def is_users_file(file: str, module: str = "") -> bool:
    """Return whether a file in a traceback is the user's: not installed, and not Flotilla's own."""
    if file.startswith("<") or _GENERATED.search(file):
        return False
    if module and module.partition(".")[0] in _imported:
        return True
    return not (file.startswith(_LIBRARIES) or _INSTALLED.intersection(Path(file).parts))


def _short_path(file: str, line: int) -> str:
    path = Path(file)
    here = Path(folder())
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


class _Finder(MetaPathFinder):
    """A finder of modules in the user's folder that no other finder has found.

    An entry at the end of `sys.path` would precede the finder of an editable installation. The
    finder of a bundle precedes `PYTHONPATH`, because an image may have older copies of the modules
    there.
    """

    def __init__(self, *, of_bundle: bool) -> None:
        """Search the user's folder or, with `of_bundle`, the folder of a bundle."""
        self.of_bundle = of_bundle

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a top-level module. A package finds its own submodules."""
        if path is not None or (self.of_bundle and (hidden(fullname) or not bundle())):
            return None
        found = PathFinder.find_spec(fullname, [folder()], target)
        # In a bundle, ignore a folder without __init__.py, because it may contain only data.
        if not self.of_bundle or found is None or found.origin is None:
            return None if self.of_bundle else found
        installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
        return None if PathFinder.find_spec(fullname, installed) else found


def find_function(what: str, name: str) -> Callable[..., Any]:
    """Return the user's function `module:function`. Raises `ConfigError`."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise ConfigError(f"{what}: {name!r} is not a function; write package.module:function")
    found = find_named(what, name, "function")
    if not callable(found):
        raise ConfigError(
            f"{what}: {attribute} is of type {type(found).__name__}; give the name of a function"
        )
    return cast("Callable[..., Any]", found)


def find_named(what: str, name: str, kind: str) -> Any:
    """Return the object `module:name`, which must be of the given kind. Raises `ConfigError`."""
    module, _, attribute = name.partition(":")
    loaded = import_named(what, module)
    if not hasattr(loaded, attribute):
        words = [word for word in vars(loaded) if not word.startswith("_")]
        hint = f"; {why}" if (why := hidden(module)) else nearest(attribute, words)
        raise ConfigError(f"{what}: {module} has no {kind} {attribute!r}{hint}")
    return getattr(loaded, attribute)


def require_arguments(
    key: str, name: str, call: Callable[..., Any], args: Mapping[str, Any], given: Sequence[str]
) -> None:
    """Raise a `ConfigError` if the arguments in `KEY.args` do not fit a function or class.

    Flotilla itself passes the arguments in `given`.
    """
    every = inspect.signature(call).parameters.values()
    takes = {each.name: each for each in every if each.kind in _BY_NAME and each.name not in given}
    known = f"it takes {', '.join(takes)}" if takes else "it takes none"
    takes_any = any(each.kind is each.VAR_KEYWORD and each.name not in given for each in every)
    for argument in args:
        if argument not in takes and not takes_any:
            hint = nearest(argument, takes)
            raise ConfigError(f"{key}.args: {name} has no argument {argument!r} ({known}){hint}")
    own = inspect.signature(call, follow_wrapped=False).parameters
    for each in takes.values():
        if each.default is each.empty and each.name in own and each.name not in args:
            raise ConfigError(
                f"{key}.args: {name} needs {each.name!r} ({known}){place_of_definition(call)}; set "
                f"{key}.args: {{{each.name}: VALUE}}"
            )


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error may be due to a package, file or network that this machine lacks."""
    return any(isinstance(each, ImportError | OSError) for each in _chain(error))


def place_of_definition(found: Any) -> str:
    """Return ` (file:line)` of a user's function or class, or an empty string for any other."""
    code = getattr(found, "__code__", None) or getattr(found.__init__, "__code__", None)
    if not code or not is_users_file(code.co_filename, str(found.__module__)):
        return ""
    return f" ({_short_path(code.co_filename, code.co_firstlineno)})"


def digest(what: str, module: str) -> str:
    """Return a digest of the source of a module and of the user's modules that it imports."""
    _look_into_folder()
    if _source_file(module) is None:
        # Unless the module is installed, raise an error that explains why it is missing.
        import_named(what, module)
    sources: dict[str, str] = {}
    left = [module]
    while left:
        name = left.pop()
        path = _source_file(name)
        if name in sources or path is None:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text, filename=str(path))
        except (OSError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{what}: cannot read {name}: {format_error(error)}") from None
        sources[name] = text
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        left += _list_imports(tree, package)
    joined = json.dumps(sources, sort_keys=True)
    return hashlib.sha256(joined.encode()).hexdigest()


def is_users(module: str) -> bool:
    """Return whether a module is a user's file, neither installed nor part of Flotilla."""
    _look_into_folder()
    return _source_file(module) is not None


def _list_imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            outer = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [outer, node.module or ""]))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            # Importing a module also runs the packages that contain it.
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _source_file(name: str) -> Path | None:
    top = name.partition(".")[0]
    if not top or top in _OWN or top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(name)
    # The name is not a valid module name, or its parent is not a package.
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    return None if _INSTALLED.intersection(path.parts) else path
