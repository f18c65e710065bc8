"""Loads a `Config` from a YAML file with `--set` assignments, or from JSON.

Every mistake is reported as a `ConfigError` in one line, with the key, the value and the allowed
values.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from flotilla.trainer.config.base import AUTO, require_writable
from flotilla.trainer.config.data import registry_name
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError, nearest

#: Keys of earlier versions, with the replacement of each.
REMOVED: Mapping[str, str] = {
    "training.cached_rows": "leave it out; rows are always read from their servers",
    "training.cache_staleness": "leave it out; rows are always read from their servers",
    "training.checkpoint_differences": "leave it out; each checkpoint is complete",
    "cluster.snapshot_seconds": "set training.checkpoint_seconds, such as 10",
}

# Values with which removed keys had no effect. A configuration recorded by an earlier version may
# still contain them.
_UNSET: Mapping[str, tuple[tuple[str, float], ...]] = {
    "training": (("cached_rows", 0), ("cache_staleness", 16), ("checkpoint_differences", 0)),
    "cluster": (("snapshot_seconds", 0),),
}
# Defaults of training keys if `training.steps` is `auto`. See `flotilla.trainer.features.length`.
BY_DATA: Mapping[str, Any] = {
    "batch_size": AUTO,
    "checkpoint_every": AUTO,
    "validate_every": AUTO,
    "patience": AUTO,
    "optimizer": {"name": "adamw", "learning_rate": AUTO, "args": {"weight_decay": 0.01}},
    "schedule": {"name": "constant", "warmup_steps": AUTO},
}
# Keys of the data section whose values may be relative paths.
_PATHS = ("source", "manual_dir", "schema_file")
_URI = re.compile("[a-z0-9]+://|file:")
# Maximum length of a message. A message quotes invalid values, which may be long.
_MOST_LETTERS = 1000


_TAG = "tag:yaml.org,2002:"
_READ_AS_OTHERS = {f"{_TAG}{name}" for name in ("bool", "int", "float", "timestamp")}
_OF_COLUMNS = ("data", "evaluation")


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps strings as written and rejects duplicate keys.

    YAML 1.1 reads `no` as false, `2` as a number and `2025-01-01` as a date. This loader keeps keys
    as written, and also the values of keys that take strings, such as column names. Unlike YAML
    1.1, it reads `1e6` as a number, because learning rates are often written this way. It rejects a
    duplicate key, which would silently replace the first one.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in getattr(node, "value", ()):
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} occurs twice", key.start_mark
                )
            seen.add(str(key.value))
            _keep_text(key)
        return super().construct_mapping(node, deep)


# Maximum size of a configuration, in bytes. PyYAML needs 20 s to read 1 MB.
_MOST_BYTES = 1 << 17
# Maximum depth at which strings are kept. The limit is needed because a node may contain itself.
_DEEPEST = 6
# Maximum number of values. Aliases of aliases could multiply a value until the memory is full.
_MOST_VALUES = 100_000

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(
    path: str | Path | None, assignments: Iterable[str] = (), *, rebases: bool = False
) -> Config:
    """Read a YAML file, apply the `section.key=value` assignments, and check all keys.

    Args:
        path: path of the file, or None for the defaults.
        assignments: assignments such as `training.steps=500`.
        rebases: whether relative paths in the file refer to its folder. If not, they refer to the
            working folder, as in a configuration that a run recorded.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or contains a value that is not allowed.
    """
    tree = _read(Path(path)) if path else {}
    if path and rebases:
        _rebase(tree.get("data"), Path(path).parent)
    lay_over(tree, assignments)
    return parse_config(tree)


def is_configuration(path: Path) -> bool:
    """Return whether a file contains a configuration, which is a mapping of its sections."""
    try:
        tree = _read(path)
    except ConfigError:
        return False
    return bool(tree) and tree.keys() <= Config.model_fields.keys()


def _rebase(data: Any, folder: Path) -> None:
    """Convert paths relative to `folder` to paths relative to the working folder."""
    for key in _PATHS if isinstance(data, dict) else ():
        value = data.get(key)
        if isinstance(value, str) and value[:1] not in ("", "/", "~") and not _URI.match(value):
            data[key] = os.path.normpath(folder / value)


def override(config: Config, assignments: Iterable[str]) -> Config:
    """Apply `section.key=value` assignments to a configuration. Raises `ConfigError`."""
    tree = config.model_dump(mode="json")
    lay_over(tree, assignments)
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Validate a nested mapping and return it as a `Config`. Raises `ConfigError`."""
    tree = {**tree}
    for name, unset in _UNSET.items():
        if isinstance(keys := tree.get(name), Mapping):
            tree[name] = {key: keys[key] for key in keys if (key, keys[key]) not in unset}
    _choose_by_roles(tree)
    _choose_by_data(tree)
    _choose_by_source(tree)
    try:
        text = json.dumps(tree, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            _one_line(f"the configuration cannot be written as JSON: {error}")
        ) from None
    try:
        # Check the values first, because later error messages would quote a forbidden value.
        require_writable(tree)
    except ValueError as error:
        raise ConfigError(_one_line(str(error))) from None
    try:
        return Config.model_validate_json(text)
    except ValidationError as invalid:
        message = "; ".join(_explain(each) for each in _innermost(invalid)[:3])
        raise ConfigError(_one_line(message)) from None


def _has_program(tree: Mapping[str, Any]) -> bool:
    program = tree.get("program")
    return isinstance(program, Mapping) and bool(program.get("command"))


def _choose_by_roles(tree: dict[str, Any]) -> None:
    roles = tree["program"].get("roles") if _has_program(tree) else None
    cluster = tree.get("cluster") or {}
    if not isinstance(roles, Mapping) or not isinstance(cluster, Mapping):
        return
    keys = {"worker": "workers", "ps": "parameter_servers"}
    tree["cluster"] = {**cluster, **{keys[role]: roles[role] for role in keys if role in roles}}


def _choose_by_data(tree: dict[str, Any]) -> None:
    """Apply the defaults of `BY_DATA` if `training.steps` is `auto`, explicitly or by default."""
    data, training = (tree.get(name) or {} for name in ("data", "training"))
    if not isinstance(data, Mapping) or not isinstance(training, Mapping):
        return
    is_by_data = training.get("steps", AUTO if data.get("source") else "") == AUTO
    if training.get("epochs"):
        tree["training"] = training = {"steps": AUTO, **training}
    if not is_by_data:
        return
    chosen = {"steps": AUTO, **training}
    of_program = ("batch_size", "checkpoint_every", "validate_every")
    by_data = {name: BY_DATA[name] for name in of_program} if _has_program(tree) else BY_DATA
    for name, value in by_data.items():
        given = training.get(name, value)
        if isinstance(value, Mapping) and isinstance(given, Mapping):
            # The defaults in `BY_DATA` do not apply to another optimizer or schedule.
            is_own = given.get("name", value["name"]) != value["name"]
            given = given if is_own else {**value, **given}
        chosen[name] = given
    if training.get("epochs") and "patience" in by_data:
        # By default, training for a given number of epochs does not stop early.
        chosen["patience"] = training.get("patience", 0)
    tree["training"] = chosen


def _choose_by_source(tree: dict[str, Any]) -> None:
    """For files, set the name from the source and the model to `auto`, unless they are set."""
    data, model = tree.get("data"), tree.get("model") or {}
    source = data.get("source") if isinstance(data, Mapping) else None
    if not source or not isinstance(source, str) or not isinstance(model, Mapping):
        return
    tree["name"] = tree.get("name") or registry_name(source)
    if not _has_program(tree):
        tree["model"] = {"name": AUTO, **model}


def parse_value(text: str, key: str = "") -> Any:
    """Parse a YAML value, for a key if one is given. Raises `ConfigError`."""
    try:
        return _load(text, key.split(".") if key else ())
    # PyYAML does not wrap the errors of its constructors: `!!bool x` raises a KeyError.
    except Exception:
        raise ConfigError(_one_line(f"{text!r} is not a valid YAML value")) from None


def _read(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        tree = _parse_recorded(text) if path.suffix == ".json" else _load(text)
    except Exception as error:  # See `parse_value`.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(_one_line(f"{path} is not valid YAML{where}: {problem}")) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        what = "a list" if isinstance(tree, list) else "a single value"
        raise ConfigError(f"{path} must contain sections with keys, not {what}")
    return tree


def _parse_recorded(text: str) -> Any:
    """Parse a recorded configuration as JSON, because YAML rejects or changes some names."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _load(text)


def _text(path: Path) -> str:
    reason = ""
    try:
        # Reading a FIFO or a device would block.
        if stat.S_ISREG(path.stat().st_mode) or path.is_dir():
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) <= _MOST_BYTES:
                return data.decode()
            reason = f"larger than {_MOST_BYTES >> 10} KiB, the maximum for a configuration"
        else:
            reason = "not a file"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
    raise ConfigError(f"cannot read the configuration {path}: {reason}")


def _load(text: str, path: Sequence[str] = ()) -> Any:
    """Return the value of a YAML document of limited size. Raises any error of PyYAML."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases expand to more than {_MOST_VALUES} values")
        _keep_texts(node, path)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _keep_texts(node: Any, path: Sequence[str]) -> None:
    """Keep unquoted scalars as strings if the key at their path takes strings."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and len(path) < _DEEPEST:
                _keep_texts(value, (*path, key.value))
    elif _takes_texts(path):
        below = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for each in below:
            _keep_text(each)


def _keep_text(node: Any) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag in _READ_AS_OTHERS:
        node.tag = f"{_TAG}str"


def _takes_texts(path: Sequence[str]) -> bool:
    kind = _find_type(path) if path and path[0] in _OF_COLUMNS else None
    return kind is str or (get_origin(kind) is tuple and get_args(kind)[0] is str)


def is_section(path: Sequence[str]) -> bool:
    """Return whether a path leads to a section."""
    return _is_section(_find_type(path))


def _find_type(path: Sequence[str]) -> Any:
    kind: Any = Config
    for part in path:
        if not _is_section(kind) or part not in kind.model_fields:
            return None
        kind = kind.model_fields[part].annotation
    return kind


def _values(node: Any, seen: dict[int, int]) -> int:
    """Return the number of values in a node with all aliases expanded.

    `seen` maps each visited node's `id` to this number. A self-reference is not followed.
    """
    if id(node) not in seen:
        seen[id(node)] = 0
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
        seen[id(node)] = 1 + sum(_values(part, seen) for part in parts)
    return seen[id(node)]


def lay_over(tree: dict[str, Any], assignments: Iterable[str]) -> None:
    """Apply assignments to a tree. Assigned epochs replace steps in the tree, and vice versa."""
    given = {_assign(tree, assignment) for assignment in assignments}
    training = tree.get("training")
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        replaces = f"training.{key}" in given and f"training.{other}" not in given
        if replaces and isinstance(training, dict) and training.get(key):
            training.pop(other, None)


def _assign(tree: dict[str, Any], assignment: str) -> str:
    key, equals, text = assignment.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"--set {assignment!r} does not have the form section.key=value")
    node = tree
    *sections, last = key.strip().split(".")
    for section in sections:
        below = node.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {assignment!r}: {section} is not a section")
        node = below
    try:
        node[last] = parse_value(text, key.strip())
    except ConfigError as error:
        raise ConfigError(_one_line(f"--set {assignment!r}: {error}")) from None
    return key.strip()


def _one_line(text: str) -> str:
    line = " ".join(text.splitlines())
    if len(line) <= _MOST_LETTERS:
        return line
    half = _MOST_LETTERS // 2
    return f"{line[:half]} ... {line[-half:]}"


def _innermost(invalid: ValidationError) -> list[Any]:
    """Return the errors, without those of containers that are invalid only due to an entry."""
    errors = invalid.errors()
    places = [error["loc"] for error in errors]
    above = {place[:size] for place in places for size in range(len(place))}
    return [error for error in errors if error["loc"] not in above]


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "json_invalid":
        return f"the configuration cannot be written as JSON: {error['ctx']['error']}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        if remedy := REMOVED.get(key):
            return f"{key}: removed in 0.2; {remedy}"
        return f"{key}: no such key{_nearest_key(error['loc'])}"
    if not key:
        return str(message)
    value = error["input"]
    if isinstance(value, str) and "://" in value:
        # A mistyped URI may contain a secret in its query.
        value = value.partition("?")[0]
    if error["type"] == "string_type" and isinstance(value, bool | int | float):
        message = "it must be a string; write it in quotes"
    elif error["type"] in ("list_type", "tuple_type"):
        message = "write a list, as in [a, b]"
    says_value = message.startswith(repr(error["input"]))
    if error["type"] == "value_error" and (isinstance(error["input"], dict) or says_value):
        return f"{key}: {message}"
    return f"{key}: {value!r} is not allowed: {message[0].lower()}{message[1:]}"


def _nearest_key(path: tuple[str | int, ...]) -> str:
    model: Any = Config
    of_entry = False
    for part in path[:-1]:
        if of_entry:
            # Skip the name or number of an entry, because the key is in the content of the entry.
            of_entry = False
            continue
        kind = model.model_fields[str(part)].annotation
        of_entry = not _is_section(kind)
        model = next(filter(_is_section, get_args(kind)), kind)
    key, keys, known = str(path[-1]), list(model.model_fields), _keys(Config)
    is_near = difflib.get_close_matches(key, keys, n=1, cutoff=0.9)
    if (is_near or key not in known) and (hint := nearest(key, keys)):
        return hint
    # The key may be spelled correctly, but in the wrong section.
    alike = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return f"; did you mean '{known[alike[0]]}'?" if alike else f" (one of {', '.join(keys)})"


def _keys(section: type[BaseModel], above: str = "") -> dict[str, str]:
    """Return the full names of all keys in a section and its subsections, keyed by last part."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            found = _keys(cast("type[BaseModel]", field.annotation), f"{above}{name}.") | found
        else:
            found[name] = f"{above}{name}"
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
