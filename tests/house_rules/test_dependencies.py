"""What is imported is declared, what is declared is imported, and all of it is pinned."""

import re
import sys
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.house_rules.source import PACKAGES, all_imports, project, python_files, text, tree

# Imported by TFDS, and by `tf.summary`, which do not declare them.
FOR_OTHERS = {"importlib-resources", "tensorboard"}
LOCKS = ("requirements.lock", "requirements-gpu.lock")
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)$")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*extras):
    section = project()["project"]
    lines = section["dependencies"] + [
        line for extra in extras for line in section["optional-dependencies"][extra]
    ]
    return [Requirement(line) for line in lines]


def lines_of(lock):
    return [line for line in text(Path(lock)).splitlines() if not line.startswith("#")]


def pins_of(lock):
    return {normal(match[1]): match[2] for match in map(PIN.match, lines_of(lock)) if match}


def imported_distributions():
    tops = {
        name.partition(".")[0]
        for path in python_files(*PACKAGES)
        for name in all_imports(tree(path))
    }
    owners = packages_distributions()
    foreign = tops - set(sys.stdlib_module_names) - set(PACKAGES)
    return {top: {normal(name) for name in owners.get(top, [])} for top in foreign}


def undeclared_and_unused():
    declared = {normal(requirement.name) for requirement in requirements("s3")}
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
                yield f"{lock}: {line!r} is no pin"
    pins = pins_of("requirements.lock")
    for requirement in requirements("s3", "dev"):
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


def test_what_is_imported_is_declared_and_locked():
    assert imported_distributions()
    offenders = [*undeclared_and_unused(), *wrong_pins(), *wrong_pins_of_the_gpu_image()]
    assert not offenders, "\n".join(offenders)
