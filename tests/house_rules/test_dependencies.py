"""What is imported is asked for, what is asked for is used, and all of it is pinned."""

import re
import sys
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.house_rules.source import PACKAGES, all_imports, project, python_files, text, tree

# Imported by TFDS, and by `tf.summary`, which do not declare them.
FOR_OTHERS = {"importlib-resources", "tensorboard"}
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)$")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(key=None):
    section = project()["project"]
    lines = section["optional-dependencies"][key] if key else section["dependencies"]
    return [Requirement(line) for line in lines]


def imported_distributions():
    tops = {
        name.partition(".")[0]
        for path in python_files(*PACKAGES)
        for name in all_imports(tree(path))
    }
    owners = packages_distributions()
    foreign = tops - set(sys.stdlib_module_names) - set(PACKAGES)
    return {top: {normal(name) for name in owners.get(top, [])} for top in foreign}


def asked_for():
    return {normal(requirement.name) for requirement in [*requirements(), *requirements("s3")]}


def test_what_is_imported_is_asked_for():
    asked = asked_for()
    assert not {top for top, owners in imported_distributions().items() if not owners & asked}


def test_what_is_asked_for_is_imported():
    used = set().union(*imported_distributions().values()) | FOR_OTHERS
    assert not asked_for() - used


def test_the_lock_file_holds_pins_only():
    lines = text(Path("requirements.lock")).splitlines()
    assert not [line for line in lines if not line.startswith("#") and not PIN.match(line)]


def test_the_lock_file_satisfies_pyproject():
    matches = map(PIN.match, text(Path("requirements.lock")).splitlines())
    pins = {normal(match[1]): match[2] for match in matches if match}
    unmet = [
        str(requirement)
        for requirement in [*requirements(), *requirements("s3"), *requirements("dev")]
        if pins.get(normal(requirement.name), "") not in requirement.specifier
        or normal(requirement.name) not in pins
    ]
    assert not unmet, "run `make lock`"


def test_the_lock_of_the_gpu_image_pins_all_that_tensorflow_asks_for():
    lines = text(Path("requirements-gpu.lock")).splitlines()
    pins = dict(PIN.match(line).groups() for line in lines if not line.startswith("#"))
    asked = [Requirement(line) for line in metadata.requires("tensorflow")]
    cuda = [each for each in asked if each.marker and "and-cuda" in str(each.marker)]
    assert {normal(each.name) for each in cuda} == set(pins)
    assert all(each.specifier.contains(pins[normal(each.name)]) for each in cuda)
