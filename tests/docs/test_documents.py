"""The documents are true: commands, settings, paths, links and targets that they name are there."""

from __future__ import annotations

import ast
import importlib
import re

import pytest
import typer
import yaml

from pipelines.app import app
from pipelines.compile import compile_pipeline
from pipelines.manifest import document as manifest
from tests.conftest import ROOT
from tests.docs.markdown import page, read, simple_commands
from tests.house_rules.source import files, python_files, text
from trainer.__main__ import _parser
from trainer.config import Config
from trainer.config_file import load, parse
from trainer.errors import ConfigError

PAGES = [
    read(ROOT / path, ROOT)
    for path in files()
    if path.suffix == ".md" and (path.parts[0] == "docs" or str(path) == "README.md")
]
NAMED = pytest.mark.parametrize("document", PAGES, ids=lambda document: str(document.path))
GROUP = typer.main.get_command(app)
TOP = {path.parts[0] for path in files()}
SECTIONS = {name for name in Config.model_fields if name != "name"}
TARGETS = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
VARIABLES = set(re.findall(r"\$\(([A-Z]+)\)", text("Makefile")))
FLOTILLA = {"flotilla", ".venv/bin/flotilla"}


def refusal(words, *, whole=True):
    """Return why the command line would refuse these words, or nothing.

    Where a page only speaks of a command it need not be `whole`: arguments may be left out.
    """
    command, path, rest = GROUP, "flotilla", list(words[1:])
    while below := getattr(command, "commands", None):
        if not rest:
            return "" if not whole else f"{path}: no command"
        name = rest.pop(0)
        if name not in below:
            return f"{path}: no command {name!r}"
        command, path = below[name], f"{path} {name}"
    try:
        context = command.make_context(path, rest)
    except typer.Exit:
        return ""
    except typer.TyperException as error:
        is_lacking = type(error).__name__ == "MissingParameter"
        return "" if is_lacking and not whole else error.format_message()
    return wrong_settings(context.params)


def wrong_settings(params):
    """Return why a run would refuse its configuration, or nothing."""
    path = params.get("config")
    if path and str(path).startswith("configs/") and not (ROOT / path).is_file():
        return f"there is no {path}"
    try:
        there = path and (ROOT / path).is_file()
        load(
            ROOT / path if there else ROOT / "configs/digits.yaml", params.get("assignments") or ()
        )
    except ConfigError as error:
        return str(error)
    return ""


def wrong_make(words):
    """Return which target, or variable, `make` would not know, or nothing."""
    for word in words[1:]:
        name, is_variable, value = word.partition("=")
        if name not in (VARIABLES if is_variable else TARGETS):
            return f"make knows no {name}"
        if (
            name == "ARGS"
            and "run" in words
            and (why := refusal(["flotilla", "run", *value.split()]))
        ):
            return why
    return ""


def wrong_task(words):
    """Return why `python -m trainer` would refuse these words, or nothing."""
    try:
        _parser().parse_args(words[3:])
    except SystemExit as end:
        return "" if not end.code else "python -m trainer refuses it"
    return ""


def wrong_command(words, *, whole=True):
    if words[0] in FLOTILLA:
        return refusal(words, whole=whole)
    if words[0] == "make":
        return wrong_make(words)
    if words[:3] == ["python", "-m", "trainer"] and whole:
        return wrong_task(words)
    return ""


def wrong_key(word):
    """Return why a key of the configuration, with a value or not, is none, or nothing."""
    key, _, value = word.partition(": ")
    if value:
        try:
            load(None, [f"{key}={value}"])
        except ConfigError as error:
            # What it needs beside it does not stand in one line of prose.
            return (
                str(error) if "no such key" in str(error) or " is not allowed" in str(error) else ""
            )
        return ""
    model = Config
    for part in key.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None:
            return ""
        if part not in fields:
            return f"no key {key}"
        model = fields[part].annotation
    return ""


def missing_path(word):
    """Say whether a word looks like a path of this repository and is none."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word) or word.split("/")[0] not in TOP:
        return False
    return not any(ROOT.glob(word.rstrip("/")))


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
        tree = yaml.safe_load(block.text)
        if "apiVersion" not in tree:
            # As far as what its TFJob would be.
            assert manifest(parse(tree))["kind"] == "TFJob"


@NAMED
def test_every_key_of_the_configuration_is_one(document):
    looks = re.compile(rf"({'|'.join(SECTIONS)})(\.[a-z_]+)+(: \S+)?")
    named = [each for each in document.inline() if looks.fullmatch(each)]
    assert not [why for each in named if not is_module(each) and (why := wrong_key(each))]


def is_module(word):
    """Say whether a word such as `storage.newest` names a part of the trainer."""
    package, _, name = word.partition(".")
    return (ROOT / "trainer" / package / f"{name}.py").exists()


@pytest.fixture(scope="module")
def run_parameters(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    pipeline = next(yaml.safe_load_all(path.read_text(encoding="utf-8")))
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
        target, _, anchor = link.partition("#")
        path = (ROOT / document.path.parent / target).resolve() if target else ROOT / document.path
        assert path.exists(), link
        assert path.is_relative_to(ROOT), link
        assert not anchor or anchor in read(path, ROOT).anchors(), link


@NAMED
def test_every_variable_is_read_by_the_code(document):
    whole = document.prose + "".join(block.text for block in document.blocks)
    source = text("Makefile") + "".join(map(text, python_files()))
    assert not [name for name in re.findall(r"FLOTILLA_[A-Z_]+", whole) if name not in source]


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


@pytest.mark.parametrize(
    "line",
    [
        "flotilla runn",
        "flotilla run --workdirs x",
        "flotilla models shows digits",
        "flotilla run configs/none.yaml",
        "flotilla run --set training.stepz=3",
        "A=1 .venv/bin/flotilla run --set training.steps=x # note",
        "cd x && flotilla models promote digits",
        "make tset",
        "make chaos TIMES=3",
        'make run ARGS="--jsn"',
        "python -m trainer task --config a --nothing",
    ],
)
def test_a_wrong_command_is_seen(line):
    document = page(ROOT / "a.md", f"Text.\n\n    {line}\n")
    assert [words for _, words in document.commands() if wrong_command(words)]


@pytest.mark.parametrize(
    "line",
    [
        "flotilla run configs/mnist.yaml --set data.manual_dir=FOLDER > log",
        "flotilla manifest | kubectl apply -f -",
        "X=1 flotilla run \\\n        --set training.steps=3",
        "flotilla models rollback digits # and again",
        "make chaos RUNS=3 SEED=1",
        'make run ARGS="configs/mnist.yaml --json"',
        "kubectl get pods",
    ],
)
def test_a_right_command_passes(line):
    document = page(ROOT / "a.md", f"Text.\n\n    {line}\n\nMore.\n\n```sh\n{line}\n```\n")
    found = [words for _, words in document.commands()]
    assert len(found) >= 2
    assert not [words for words in found if wrong_command(words)]


def test_prose_may_name_a_command_without_its_arguments():
    assert not wrong_command(["flotilla", "compare"], whole=False)
    assert wrong_command(["flotilla", "compare"])
    assert wrong_command(["flotilla", "compare", "--nothing"], whole=False)


@pytest.mark.parametrize(
    "word", ["training.stepz", "cluster.kubernetes.pod.imag", "cluster.launcher: moon"]
)
def test_a_wrong_key_is_seen(word):
    assert wrong_key(word)


@pytest.mark.parametrize(
    "word", ["model.args.hidden_units", "cluster.kubernetes.worker.env", "cluster.launcher: tfjob"]
)
def test_a_right_key_passes(word):
    assert not wrong_key(word)


@pytest.mark.parametrize(
    ("word", "is_missing"),
    [("trainer/none.py", True), ("trainer/config.py", False), ("configs/mnist*.yaml", False)],
)
def test_a_missing_path_is_seen(word, is_missing):
    assert missing_path(word) == is_missing
