"""The documents are true: commands, settings, paths, links and targets that they name are there."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache

import pytest
import yaml

from components.launchers import document_of
from pipelines.compile import compile_pipeline
from tests.conftest import ROOT
from tests.docs.claims import missing_path, wrong_command, wrong_key
from tests.docs.markdown import read, simple_commands
from tests.house_rules.source import files, python_files, text
from trainer.config.load import REMOVED, parse_config
from trainer.config.schema import Config

PAGES = [
    read(ROOT / path, ROOT)
    for path in files()
    if path.suffix == ".md" and (path.parts[0] == "docs" or str(path) == "README.md")
]
NAMED = pytest.mark.parametrize("document", PAGES, ids=lambda document: str(document.path))
SECTIONS = {name for name in Config.model_fields if name != "name"}
VARIABLE = re.compile(r"FLOTILLA_[A-Z_]+")


@cache
def variables_of_the_code():
    """Return the names of all variables of the environment that the code has."""
    return {
        name
        for source in (text("Makefile"), *map(text, python_files()))
        for name in VARIABLE.findall(source)
    }


@NAMED
def test_every_command_is_one(document):
    wrong = {where: why for where, words in document.commands() if (why := wrong_command(words))}
    assert not wrong


@NAMED
def test_every_command_in_the_prose_is_one(document):
    spoken = [words for each in document.inline() for words in spoken_commands(each)]
    wrong = {" ".join(words): why for words in spoken if (why := wrong_command(words, whole=False))}
    assert not wrong


def spoken_commands(inline):
    return simple_commands(inline) if inline.startswith(("flotilla ", "make ")) else []


@NAMED
def test_every_snippet_of_a_configuration_is_valid(document):
    for block in document.of("yaml"):
        tree = yaml.load(block.text, yaml.CSafeLoader)
        if "apiVersion" not in tree:
            # As far as what its job would be: it is refused where the engine lacks a setting.
            config = parse_config(tree)
            kind = "JobSet" if config.cluster.launcher == "jobset" else "TFJob"
            assert document_of(config)["kind"] == kind


@NAMED
def test_every_key_of_the_configuration_is_one(document):
    looks = re.compile(rf"({'|'.join(SECTIONS)})(\.[a-z_]+)+(: \S+)?")
    gone = REMOVED if "decisions" in document.path.parts else ()
    named = [each for each in document.inline() if looks.fullmatch(each) and each not in gone]
    assert not [why for each in named if not is_module(each) and (why := wrong_key(each))]


def is_module(word):
    """Say whether a word such as `storage.newest` names a part of the trainer."""
    package, _, name = word.partition(".")
    return (ROOT / "trainer" / package / f"{name}.py").exists()


@pytest.fixture(scope="module")
def run_parameters(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    pipeline = next(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))
    return set(pipeline["root"]["inputDefinitions"]["parameters"])


@NAMED
def test_every_run_parameter_is_one(document, run_parameters):
    prose = " ".join(document.prose.split())
    assert not set(re.findall(r"run parameter `(\w+)`", prose)) - run_parameters


@NAMED
def test_every_path_is_there(document):
    assert not [each for each in document.inline() if missing_path(each)]


@NAMED
def test_every_link_leads_somewhere(document):
    for link in document.links():
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        path = (ROOT / document.path.parent / target).resolve() if target else ROOT / document.path
        assert path.exists(), link
        assert path.is_relative_to(ROOT), link
        assert not fragment or fragment in read(path, ROOT).fragments(), link


@NAMED
def test_every_variable_is_read_by_the_code(document):
    whole = document.prose + "".join(block.text for block in document.blocks)
    assert not set(VARIABLE.findall(whole)) - variables_of_the_code()


@NAMED
def test_every_import_finds_what_it_names(document):
    for block in document.of("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer"):
                module = importlib.import_module(node.module)
                assert not [each.name for each in node.names if not hasattr(module, each.name)]


def test_every_page_is_two_links_away_from_the_readme():
    pages = {document.path: document for document in PAGES}

    def linked(path):
        targets = [link.partition("#")[0] for link in pages[path].links()]
        found = {(ROOT / path.parent / target).resolve() for target in targets if target}
        below = {each / "README.md" if each.is_dir() else each for each in found}
        return {each.relative_to(ROOT) for each in below if each.is_relative_to(ROOT)} & set(pages)

    (readme,) = (path for path in pages if str(path) == "README.md")
    first = linked(readme)
    second = set().union(*map(linked, first))
    decisions = {path for path in pages if "decisions" in path.parts}
    assert not set(pages) - {readme} - first - second - decisions
