"""Imports and declared dependencies match, and all dependencies are pinned."""

import ast
import re
import runpy
import subprocess
import sys
from hashlib import sha256
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.house_rules.source import (
    PACKAGES,
    all_imports,
    imported,
    is_within,
    project,
    python_files,
    text,
    tree,
)

# TFDS, `tf.summary` and model_signing import these without declaring them.
FOR_OTHERS = {"importlib-resources", "tensorboard", "pyopenssl"}
LOCKS = [f"requirements{kind}.lock" for kind in ("", "-dev", "-cpu", "-gpu")]
IMAGE = runpy.run_path(".ci/lock.py")
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)((?: --hash=sha256:[0-9a-f]{64})+)$")


# Private modules of TensorFlow and Keras: check each line at an upgrade of TensorFlow.
MOST_PRIVATE_IMPORTS = 20
PRIVATE = ("tensorflow.python", "tensorflow.core", "keras.src")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def extras_of_users():
    return set(project()["project"]["optional-dependencies"]) - {"dev"}


def requirements(*extras):
    section = project()["project"]
    lines = section["dependencies"] + [
        line for extra in extras for line in section["optional-dependencies"][extra]
    ]
    return [Requirement(line) for line in lines]


def lines_of(lock):
    joined = re.sub(r" \\\n +", " ", text(Path(lock)))
    return [line for line in joined.splitlines() if not line.startswith("#")]


def pins_of(lock):
    return {normal(match[1]): match[2] for match in map(PIN.match, lines_of(lock)) if match}


def loaded_by_name(module):
    """Return what `importlib.import_module` gets as a constant: packages without types."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def imported_distributions():
    tops = {
        name.partition(".")[0]
        for path in python_files(*PACKAGES)
        for name in (*all_imports(tree(path)), *loaded_by_name(tree(path)))
    }
    owners = packages_distributions()
    foreign = tops - set(sys.stdlib_module_names) - {"flotilla"}
    return {top: {normal(name) for name in owners.get(top, [])} for top in foreign}


def undeclared_and_unused():
    declared = {normal(requirement.name) for requirement in requirements(*extras_of_users())}
    imported = imported_distributions()
    for top, owners in imported.items():
        if not owners & declared:
            yield f"pyproject.toml: {top} is imported but not declared"
    for name in declared - set().union(*imported.values()) - FOR_OTHERS:
        yield f"pyproject.toml: {name} is declared but never imported"


def wrong_pins():
    for lock in LOCKS:
        for line in lines_of(lock):
            if not PIN.match(line):
                yield f"{lock}: {line!r} is no pin with hashes"
    pins = pins_of("requirements.lock")
    if pins_of("requirements-cpu.lock") != {"tensorflow-cpu": pins["tensorflow"]}:
        yield "requirements-cpu.lock: it is not the version of requirements.lock: `make lock`"
    pins |= pins_of("requirements-dev.lock")
    for requirement in requirements(*IMAGE["IMAGE_EXTRAS"], "dev"):
        pin = pins.get(normal(requirement.name), "")
        if not pin or pin not in requirement.specifier:
            yield f"requirements.lock: {requirement} is pinned to {pin or 'nothing'}: `make lock`"


def wrong_pins_of_the_gpu_image():
    pins = pins_of("requirements-gpu.lock")
    asked = [Requirement(line) for line in metadata.requires("tensorflow")]
    cuda = {normal(each.name): each for each in asked if "and-cuda" in str(each.marker)}
    for name in cuda.keys() ^ pins.keys():
        yield f"requirements-gpu.lock: {name} is only in one of tensorflow[and-cuda] and the lock"
    for name in cuda.keys() & pins.keys():
        if not cuda[name].specifier.contains(pins[name]):
            yield f"requirements-gpu.lock: {name}=={pins[name]} is not {cuda[name]}"


def private_imports():
    for path in python_files(*PACKAGES):
        for node in ast.walk(tree(path)):
            if any(is_within(name, *PRIVATE) for name in imported(node)):
                yield f"{path}:{node.lineno}"


def test_few_lines_import_what_tensorflow_and_keras_do_not_promise():
    found = list(private_imports())
    assert len(found) <= MOST_PRIVATE_IMPORTS, "\n".join(found)


def test_what_is_imported_is_declared_and_locked():
    assert imported_distributions()
    offenders = [*undeclared_and_unused(), *wrong_pins(), *wrong_pins_of_the_gpu_image()]
    assert not offenders, "\n".join(offenders)


def test_the_lock_of_an_image_is_complete_and_has_nothing_of_development():
    found = IMAGE["needed_by"](map(str, requirements(*IMAGE["IMAGE_EXTRAS"])))
    assert found == pins_of("requirements.lock").keys()


@pytest.mark.parametrize(("hashes", "code"), [("right", 0), ("wrong", 1)])
def test_a_package_with_another_hash_is_not_installed(tmp_path, hashes, code):
    wheel = tmp_path / "given-1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("given.py", "")
        archive.writestr(
            "given-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: given\nVersion: 1\n"
        )
        archive.writestr("given-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("given-1.dist-info/RECORD", "")
    digest = sha256(wheel.read_bytes() if hashes == "right" else b"other").hexdigest()
    lock = tmp_path / "lock"
    lock.write_text(f"given @ {wheel.as_uri()} \\\n    --hash=sha256:{digest}\n")
    (options,) = re.findall(
        r"install (.*--no-build-isolation) \\\n.*requirements-dev", text(Path("Makefile"))
    )
    pip = [sys.executable, "-m", "pip", "install", *options.split()]
    place = ["--target", tmp_path / "there"]
    done = subprocess.run(
        [*pip, *place, "--requirement", lock], text=True, capture_output=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "there" / "given.py").exists() is (code == 0)
    assert ("DO NOT MATCH THE HASHES" in done.stderr) is (code == 1)


def test_nothing_is_installed_without_its_hash():
    for file in ("Makefile", "Dockerfile"):
        whole = re.sub(r"\\\n\s*", " ", text(Path(file)))
        for call in re.findall(r"(?:pip|PIP\)) install (.*?)(?:&&|\n|$)", whole):
            # The project itself, and what `make lock` pins.
            is_own = "--no-deps" in call or "'.[dev]'" in call
            assert is_own or "--require-hashes" in call, f"{file}: {call}"
            # Without it, a requirement with an extra resolves to the newest version.
            for lock in re.findall(r"--requirement (requirements\S*)", call):
                assert f"--constraint {lock}" in call, f"{file}: {call}"
            assert is_own or "--no-build-isolation" in call or "build.lock" in call, (
                f"{file}: {call}"
            )
