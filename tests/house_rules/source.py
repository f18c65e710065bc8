"""The files of the repository, for checks of the source code."""

import ast
import os
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("trainer", "components", "pipelines")
# Folders to skip if git is not available, for example in an unpacked source archive.
NOT_OURS = {"build", "dist", "runs", "__pycache__"}


@cache
def files() -> tuple[Path, ...]:
    """Return every file that is tracked or not ignored, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
        names = listed.stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [str(path.relative_to(ROOT)) for path in _walk(ROOT)]
    return tuple(Path(name) for name in sorted(set(names)) if name and (ROOT / name).is_file())


def _walk(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.is_file():
            yield Path(entry.path)
        elif entry.name == ".ci" or not (entry.name.startswith(".") or entry.name in NOT_OURS):
            yield from _walk(Path(entry.path))


def python_files(*packages: str) -> list[Path]:
    """Return all Python files, or those in the given top-level folders."""
    return [
        path
        for path in files()
        if path.suffix == ".py" and (not packages or path.parts[0] in packages)
    ]


def source_modules() -> list[Path]:
    return [path for path in python_files(*PACKAGES) if path.name != "__init__.py"]


@cache
def text(path: Path) -> str:
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = ("flotilla", *parts) if parts[0] in PACKAGES else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(name: str, *packages: str) -> bool:
    """Return whether a dotted name is one of these modules or packages, or inside one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names; `from a import b` may name `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports_on_load(module: ast.Module) -> list[str]:
    """Return the imports that run when the module is loaded: all imports outside of functions."""
    found: list[str] = []
    pending: list[ast.AST] = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        found += imported(node)
        pending += ast.iter_child_nodes(node)
    return found


@cache
def all_imports(module: ast.Module) -> list[str]:
    """Return every import of the module, including those inside functions."""
    return [name for node in ast.walk(module) for name in imported(node)]


def importers() -> dict[str, set[str]]:
    """Return, for each source module, the source modules that import it."""
    names = {module_name(path) for path in source_modules()}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in python_files(*PACKAGES):
        for name in all_imports(tree(path)):
            for target in {name, name.rpartition(".")[0]} & names:
                found[target].add(module_name(path))
    return found


def project() -> dict[str, Any]:
    return tomllib.loads(text(Path("pyproject.toml")))


def tensorflow_free() -> list[str]:
    contracts = project()["tool"]["importlinter"]["contracts"]
    named = "These rooms are free of TensorFlow"
    return next(each["source_modules"] for each in contracts if each["name"] == named)
