"""Lists of objects with the API server's filters, sort orders, page tokens and page sizes.

The behavior was observed on a real instance and checked against the source of 2.17
(`server/list_request_util.go`, `list` and `filter` in `backend/src/apiserver`).
"""

import base64
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_plus

from tests.kfp_instance.store import RefusedError, Tree

# The SDK sends operations as numbers.
OPERATIONS = {1: "EQUALS", 9: "IS_SUBSTRING"}
# Keys that filters and orders may use, by kind of object.
_ALL = ("display_name", "name", "created_at", "description", "namespace", "id")
FIELDS = {
    "pipelines": (*_ALL, "pipeline_id"),
    "pipeline_versions": (*_ALL, "pipeline_version_id", "pipeline_id"),
    "experiments": (*_ALL, "experiment_id", "last_run_created_at", "storage_state"),
    "runs": (*_ALL, "run_id", "finished_at", "state", "experiment_id", "recurring_run_id"),
    "recurringRuns": ("display_name", "name", "created_at", "updated_at", "description", "id",
                      "recurring_run_id"),
}  # fmt: skip
_MOST, _DEFAULT = 200, 20
_PREDICATE = {"operation", "key", "stringValue", "string_value"}


def page_of(
    things: Iterable[Tree], name: str, query: dict[str, str], *, operations: tuple[str, ...] = ()
) -> Tree:
    """Return a sorted page of the objects that match the filter.

    If `operations` is not empty, the filter may use only these operations.
    """
    rows, text = list(things), query.get("filter", "")
    wanted = {"sort_by": query.get("sort_by", ""), "filter": text}
    first = 0
    if token := query.get("page_token"):
        first, same = _place(token)
        if any(wanted.values()) and same != wanted:
            raise RefusedError(400, "page token does not match the supplied sort by and/or filter")
        wanted = same
    for predicate in _predicates(wanted["filter"]):
        rows = _let_through(rows, predicate, name, operations)
    rows = _sorted(rows, name, wanted["sort_by"])
    size = _size(query.get("page_size", "0"))
    page: Tree = {name: rows[first : first + size], "total_size": len(rows)}
    if first + size < len(rows):
        page["next_page_token"] = base64.b64encode(
            json.dumps({"first": first + size, **wanted}).encode()
        ).decode()
    return page if rows else {}


def _size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise RefusedError(400, f"parsing field page_size: {text!r} is not an integer") from None
    if size < 0:
        raise RefusedError(400, f"The page size should be greater than 0. Got {size}")
    return min(size or _DEFAULT, _MOST)


def _place(token: str) -> tuple[int, dict[str, str]]:
    try:
        tree = json.loads(base64.b64decode(token, validate=True))
        return int(tree.pop("first")), tree
    except (ValueError, KeyError, AttributeError):
        raise RefusedError(400, "Invalid page token") from None


def _predicates(text: str) -> list[Tree]:
    """Return the predicates of a filter; its text is percent-decoded a second time."""
    if not text:
        return []
    if re.search(r"%(?![0-9a-fA-F]{2})", text):
        raise RefusedError(400, f"failed to parse valid filter from {text!r}: invalid URL escape")
    try:
        tree = json.loads(unquote_plus(text, errors="strict"))
        found: list[Tree] = tree.pop("predicates", [])
        right = not tree and all(set(each) <= _PREDICATE and "key" in each for each in found)
    except (ValueError, AttributeError, TypeError):
        right = False
    if not right:
        raise RefusedError(400, f"failed to parse valid filter from {text!r}")
    return found


def _let_through(
    rows: list[Tree], predicate: Tree, name: str, operations: tuple[str, ...]
) -> list[Tree]:
    operation = OPERATIONS.get(predicate["operation"], predicate["operation"])
    if operation not in (operations or OPERATIONS.values()):
        raise RefusedError(400, f"invalid filter: operation {operation} is not supported")
    key = predicate["key"]
    if key not in FIELDS[name]:
        raise RefusedError(400, f"no support for filtering on unrecognized field {key!r}")
    wanted = predicate.get("stringValue", predicate.get("string_value", ""))
    if operation == "EQUALS":
        # The database and Kubernetes compare names without regard to case.
        return [row for row in rows if str(row.get(key, "")).lower() == wanted.lower()]
    if operations:
        return [row for row in rows if wanted.lower() in str(row.get(key, "")).lower()]
    pattern = _like(wanted)
    return [row for row in rows if pattern.search(str(row.get(key, "")))]


def _like(text: str) -> re.Pattern[str]:
    """Return a pattern equivalent to MySQL's LIKE '%text%', with its wildcards `%` and `_`."""
    parts, letters = [], iter(text)
    for letter in letters:
        literal = next(letters, "\\") if letter == "\\" else ""
        wild = {"%": ".*", "_": "."}.get(letter, re.escape(letter))
        parts.append(re.escape(literal) if literal else wild)
    return re.compile("".join(parts), re.IGNORECASE | re.DOTALL)


def _sorted(rows: list[Tree], name: str, order: str) -> list[Tree]:
    words = order.lower().split()
    if len(words) > 2 or (len(words) == 2 and words[1] not in ("asc", "desc")):
        raise RefusedError(400, f"Received invalid sort by format {order!r}")
    if not words:
        return rows
    if words[0] not in FIELDS[name]:
        raise RefusedError(400, f"Invalid sorting field: {words[0]!r}")
    key = words[0]

    def place(row: Tree) -> Any:
        return row.get(key, "")

    return sorted(rows, key=place, reverse=words[1:] == ["desc"])
