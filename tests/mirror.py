"""Finds the tests of changed files for `make check`.

    trainer/storage/uri.py      tests/trainer/storage/test_uri.py and test_uri_*.py
    components/train_model.py   tests/components/test_train_model.py and test_train_model_*.py
    trainer/__main__.py         tests/trainer/test_main.py and test_main_*.py
    benchmarks/baselines/fit.py tests/benchmarks/test_baselines.py, named after the package
    any other module            the tests that import it
    a test file                 the file itself
    a file that no test imports the tests in ELSEWHERE

`python -m tests.mirror [REV]` prints the tests of all files that differ from REV (default: HEAD),
including untracked files. Changed files without tests are listed on standard error.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from tests.house_rules.source import all_imports, module_name, tree

ROOT = Path(__file__).parent.parent
MIRRORED = ("trainer", "components", "pipelines", "benchmarks")
# Tests of files that no test imports and that no test's name matches.
ELSEWHERE = {
    "CHANGELOG.md": ("tests/docs",),
    "CONTRIBUTING.md": ("tests/docs",),
    "README.md": ("tests/docs",),
    "SECURITY.md": ("tests/docs",),
    ".github": ("tests/test_forge.py",),
    "mkdocs.yml": ("tests/docs/test_site.py",),
    "components/kubernetes": ("tests/components/kubernetes",),
    "configs": ("tests/pipelines/test_configs.py", "tests/docs"),
    "deploy": (
        "tests/test_deploy.py",
        "tests/components/kubernetes/test_requirements.py",
    ),
    "examples": ("tests/examples",),
    "docs": ("tests/docs", "tests/golden/test_reference.py"),
    "pipelines/cli": (
        "tests/pipelines/cli",
        "tests/bad_inputs",
        "tests/golden/test_command_line.py",
    ),
    "pipelines/runs/local_child.py": ("tests/pipelines/runs/test_local_whole.py",),
    "tests/golden": ("tests/golden",),
    "trainer/data/files/formats": ("tests/trainer/data/test_files.py",),
    "trainer/export/smoke_request.py": ("tests/trainer/export/test_formats.py",),
    "trainer/prediction": ("tests/trainer/prediction",),
    "trainer/embeddings/table_shard.py": ("tests/trainer/embeddings/test_embedding_table.py",),
    "trainer/storage": ("tests/trainer/storage",),
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The tests to run after a change; `unmirrored` are changed files without tests."""

    tests: tuple[str, ...]
    unmirrored: tuple[str, ...]


def is_test(path: PurePosixPath) -> bool:
    return path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py"


def stem(path: PurePosixPath) -> str:
    """Return a file's name as it appears in its tests' names: `main` for `__main__.py`."""
    return path.stem.strip("_")


def mirrors(source: PurePosixPath, files: Sequence[PurePosixPath]) -> list[str]:
    """Return the test files named after `source` (and not after a longer name) or its package."""
    names = {stem(path) for path in files if path.parent == source.parent}
    own = [
        test
        for test in files_of(PurePosixPath("tests", source.parent), files)
        if longest(test, names) == stem(source)
    ]
    package = source.parent.name
    of_package = [
        test
        for test in files_of(PurePosixPath("tests", source.parent.parent), files)
        if longest(test, {package}) == package
    ]
    return [str(path) for path in own or of_package]


def files_of(folder: PurePosixPath, files: Sequence[PurePosixPath]) -> list[PurePosixPath]:
    return [path for path in files if path.parent == folder and is_test(path)]


def longest(test: PurePosixPath, names: Iterable[str]) -> str:
    """Return the longest of `names` that a test file's name begins with; empty if none does."""
    words = test.stem.removeprefix("test_")
    return max((name for name in names if f"{words}_".startswith(f"{name}_")), key=len, default="")


def importing(source: PurePosixPath, files: Sequence[PurePosixPath]) -> list[str]:
    name = module_name(Path(source))
    return [str(path) for path in files if is_test(path) and name in modules_imported(path)]


@cache
def modules_imported(path: PurePosixPath) -> frozenset[str]:
    names = all_imports(tree(Path(path)))
    return frozenset(part for name in names for part in (name, name.rpartition(".")[0]))


def select(changed: Sequence[str], files: Iterable[str]) -> Selection:
    """Return the tests of the `changed` files (including removed ones), chosen from all `files`."""
    paths = [PurePosixPath(name) for name in files]
    tests: set[str] = set()
    unmirrored = []
    for name in changed:
        path = PurePosixPath(name)
        if is_test(path):
            tests.update({name} if path in paths else ())
            continue
        found = find_tests(path, paths)
        tests.update(found)
        unmirrored += [] if found else [name]
    return Selection(tests=tuple(sorted(tests)), unmirrored=tuple(unmirrored))


def find_tests(path: PurePosixPath, files: Sequence[PurePosixPath]) -> list[str]:
    if path.parts[0] in MIRRORED and path.suffix == ".py":
        found = mirrors(path, files) or importing(path, files)
        if found:
            return found
    places = [place for place in ELSEWHERE if PurePosixPath(place) in [path, *path.parents]]
    return list(ELSEWHERE[max(places, key=len)]) if places else []


def git_lines(*arguments: str) -> list[str]:
    """Return the output lines of a git command; exit if git fails."""
    verb, *others = arguments
    command = ["git", verb, "-z", *others]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    if listed.returncode:
        reason = (listed.stderr.strip() or "git failed").splitlines()[0]
        sys.exit(f"{reason}; SINCE is a revision of this git repository")
    return [name for name in listed.stdout.split("\0") if name]


def main(base: str = "HEAD") -> None:
    untracked = git_lines("ls-files", "--others", "--exclude-standard")
    changed = sorted({*git_lines("diff", "--name-only", "--no-renames", base, "--"), *untracked})
    # The index still lists deleted files.
    tracked = [name for name in git_lines("ls-files") if (ROOT / name).exists()]
    selection = select(changed, [*tracked, *untracked])
    for name in selection.unmirrored:
        sys.stderr.write(f"{name}: no test mirrors it: `make test` shows what it breaks\n")
    sys.stdout.write("\n".join(selection.tests) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
