"""Imports match the declared dependencies, and all dependencies are pinned."""

import ast
import os
import re
import subprocess
import sys
from hashlib import sha256
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.markers import Marker
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
from tests.wheels import write_wheel

# TFDS, `tf.summary` and `model_signing` import these without declaring them.
FOR_OTHERS = {"importlib-resources", "tensorboard", "pyopenssl"}
# This module runs in the environment of MLflow's users, with MLflow's dependencies.
FOREIGN = Path("trainer/tracking/pyfunc_loader.py")
LOCKS = [f"requirements{kind}.lock" for kind in ("", "-dev", "-build", "-cpu", "-gpu")]
IMAGE_EXTRAS = re.findall(
    r"--extra (\w+)", re.findall("^IMAGE_EXTRAS := (.*)", text(Path("Makefile")), re.MULTILINE)[0]
)
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)(?: ; ([^\\]+?))?((?: --hash=sha256:[0-9a-f]{64})+)$")


# Maximum number of lines that import private TensorFlow or Keras modules. Check each of them when
# upgrading TensorFlow or Keras.
MOST_PRIVATE_IMPORTS = 20
PRIVATE = ("tensorflow.python", "tensorflow.core", "keras.src")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def extras_of_users():
    return set(project()["project"]["optional-dependencies"]) - {"dev", "docs"}


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
    """Return the constant arguments of `importlib.import_module`, which loads untyped packages."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def imported_distributions():
    tops = {
        name.partition(".")[0]
        for path in python_files(*PACKAGES)
        if path != FOREIGN
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
                yield f"{lock}: {line!r} is not a pin with hashes"
    pins = pins_of("requirements.lock")
    if pins_of("requirements-cpu.lock") != {"tensorflow-cpu": pins["tensorflow"]}:
        yield "requirements-cpu.lock: it is not the version of requirements.lock: `make lock`"
    for lock in ("requirements-build.lock", "requirements-dev.lock"):
        for name, pin in pins_of(lock).items():
            if pins.get(name, pin) != pin:
                yield f"{lock}: {name} is another version than in requirements.lock: `make lock`"
    pins |= pins_of("requirements-dev.lock") | pins_of("requirements-build.lock")
    for requirement in requirements(*IMAGE_EXTRAS, "dev"):
        pin = pins.get(normal(requirement.name), "")
        if not pin or pin not in requirement.specifier:
            yield f"requirements.lock: {requirement} is pinned to {pin or 'nothing'}: `make lock`"


def required_here(*roots):
    """Return the names of the packages that these requirements need on this machine."""
    open_ones, found = list(roots), set()
    while open_ones:
        one = open_ones.pop()
        for extra in ("", *one.extras):
            if (normal(one.name), extra) in found:
                continue
            found.add((normal(one.name), extra))
            try:
                below = map(Requirement, metadata.requires(one.name) or ())
            except metadata.PackageNotFoundError:
                continue
            open_ones += [
                each
                for each in below
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in found}


def pinned_here(lock):
    lines = [match for match in map(PIN.match, lines_of(lock)) if match]
    return {normal(line[1]) for line in lines if not line[3] or Marker(line[3]).evaluate()}


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


def test_a_lock_is_complete():
    # Packages are installed without their requirements, so the lock must contain all of them.
    needed = required_here(*requirements(*IMAGE_EXTRAS))
    assert needed == pinned_here("requirements.lock")
    assert needed | required_here(*requirements("dev")) <= pinned_here("requirements-dev.lock")


@pytest.mark.parametrize("hashes", ["right", "wrong"])
@pytest.mark.parametrize(
    ("installer", "refusal"), [("uv pip", "Hash mismatch"), ("pip", "DO NOT MATCH THE HASHES")]
)
def test_a_package_with_another_hash_is_not_installed(tmp_path, installer, refusal, hashes):
    pytest.importorskip(installer.split()[0], reason="there is no uv for this platform")
    wheel = write_wheel(tmp_path, "given")
    digest = sha256(wheel.read_bytes() if hashes == "right" else b"other").hexdigest()
    lock = tmp_path / "lock"
    lock.write_text(f"given==1 --hash=sha256:{digest}\n")
    (options,) = re.findall(
        r"UV\) pip install (.*?) \\\n.*requirements-dev", text(Path("Makefile"))
    )
    place = ["--target", tmp_path / "there", "--requirement", lock]
    command = [sys.executable, "-m", *installer.split(), "install", *options.split(), *place]
    offline = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    wheels = {"UV_FIND_LINKS": str(tmp_path), "PIP_FIND_LINKS": str(tmp_path)}
    environment = os.environ | offline | wheels
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == (0 if hashes == "right" else 1), done.stderr
    assert (tmp_path / "there" / "given.py").exists() is (hashes == "right")
    assert (refusal in done.stderr) is (hashes == "wrong")


def test_nothing_is_installed_without_its_hash():
    for file in ("Makefile", "Dockerfile"):
        whole = re.sub(r"\\\n\s*", " ", text(Path(file)))
        for call in re.findall(r"pip install (.*?)(?:&&|;|\n|$)", whole):
            # Each lock file lists all packages. Only the project itself is installed without a lock
            # file.
            assert "--no-deps" in call, f"{file}: {call}"
            assert "--no-build-isolation" in call, f"{file}: {call}"
            assert ("--require-hashes" in call) is ("--requirement " in call), f"{file}: {call}"
