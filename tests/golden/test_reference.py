"""The reference pages match the code: a changed key or option changes its page."""

import re
from typing import Annotated

import pytest
import typer
import yaml
from pydantic import BaseModel

from docs.build.reference import command_line, components, configuration, flat, parameters
from flotilla.pipelines.cli.app import app
from flotilla.pipelines.compile import compile_pipeline
from flotilla.pipelines.training import COMPONENTS
from flotilla.trainer.config.cluster import PodConfig
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.config.schema import Config
from tests.conftest import ROOT

GROUP = typer.main.get_command(app)
REFERENCE = ROOT / "docs" / "reference"


def rows(text, heading=""):
    """Return the cells of every table row on a page, or in one of its sections."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] if heading else text
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


ENTRY = re.compile(r"^- (`.+?`(?:, `.+?`)*)(?: \((.+?)\))?: (.+)$", re.MULTILINE)


def entries(text, heading=""):
    """Return the name, facts and description of every list item on a page, or in one section."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] if heading else text
    return [(name, *facts.split("; "), meaning) for name, facts, meaning in ENTRY.findall(part)]


def leaves(model, path=""):
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.fixture
def declared(tmp_path):
    compile_pipeline(tmp_path / "pipeline.yaml")
    documents = yaml.load_all(
        (tmp_path / "pipeline.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
    )
    return next(documents)["root"]["inputDefinitions"]["parameters"]


def test_the_pages_are_the_golden_files(golden, declared):
    golden("configuration.md", configuration(), REFERENCE)
    golden("parameters.md", parameters(declared), REFERENCE)
    golden("command-line.md", command_line(GROUP), REFERENCE)
    golden("components.md", components(COMPONENTS), REFERENCE)


def test_every_key_of_the_configuration_has_one_row():
    found = [row[0].strip("`") for row in entries(configuration())]
    again = {f"cluster.kubernetes.{role}" for role in ("chief", "ps", "worker", "evaluator")}
    wanted = [key for key in leaves(Config) if not key.startswith(tuple(f"{r}." for r in again))]
    assert not [key for key in wanted if found.count(key) != 1]
    assert again < set(found)


def test_every_key_has_a_type_and_a_meaning():
    assert not [row for row in entries(configuration()) if not row[1] or len(row[-1].split()) < 1]


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("training.steps", ["whole number", "default `1500`", "at least 1, or `auto`"]),
        ("gate.champion.confidence", ["number", "default `0.995`", "at least 0.5, below 1"]),
        ("data.partition", ["default `disjoint`", "one of `disjoint`, `dynamic`, `reshuffle`"]),
        ("export.formats", ["list of text", 'default `["saved_model", "keras"]`']),
        ("cluster.kubernetes.job.backoff_limit", ["whole number or `null`", "default `null`"]),
        ("cluster.kubernetes.pod.volumes[].name", ["name", "required"]),
        ("training.schedule.args.decay_rate", ["number", "required"]),
        ("model.args", ["mapping"]),
    ],
)
def test_a_row_says_type_default_and_bounds(key, cells):
    row = next(row for row in entries(configuration()) if row[0] == f"`{key}`")
    assert list(row[1 : 1 + len(cells)]) == cells


def test_pods_are_described_once():
    page = configuration()
    assert page.count("cluster.kubernetes.pod.image_pull_secrets") == 1
    assert "cluster.kubernetes.worker.image" not in page
    part = page.partition("\n## `cluster.kubernetes.pod`\n")[2].partition("\n## ")[0]
    assert not [
        each for each in PodConfig.model_fields if f"`cluster.kubernetes.pod.{each}`" not in part
    ]


def test_every_relation_between_keys_is_documented():
    rules = configuration().partition("## Rules between keys\n\n")[2]
    checks = set(Config.__pydantic_decorators__.model_validators) - {"_built_parts_only"}
    assert len(rules.splitlines()) == len(checks)
    assert "`cluster.workers` is at most `data.shards`" in rules


def test_every_run_parameter_is_named_with_its_key(declared):
    found = {row[0].strip("`"): row for row in rows(parameters(declared))}
    assert set(found) == set(declared)
    assert found["steps"][1:4] == ["NUMBER_INTEGER", "`1500`", "`training.steps`"]


def test_every_component_has_a_part_with_its_inputs_and_outputs():
    page = components(COMPONENTS)
    for each in COMPONENTS:
        part = page.partition(f"\n## `{each.name}`\n")[2].partition("\n## ")[0]
        assert each.description.split()[0] in part
        named = {*each.component_spec.inputs, *(each.component_spec.outputs or {})}
        lacking = {name for name in named if f"`{name}`" not in part}
        assert lacking == (set(declared_names()) if "every run parameter" in part else set())


def declared_names():
    return [each.name for each in FIELDS]


def test_every_command_has_a_part_with_all_of_its_options():
    page = command_line(GROUP)
    common = str(entries(page, "Options of several commands"))
    for name, command in flat(GROUP.commands):
        part = page.partition(f"\n## `flotilla {name}`\n")[2].partition("\n## ")[0]
        every = [option for each in command.params for option in each.opts + each.secondary_opts]
        options = {option for option in every if "-" in option}
        assert not {option for option in options if f"`{option}" not in part + common}, name


def test_an_option_names_its_environment_variable():
    small = typer.Typer()

    @small.command("ask", epilog="More of it.")
    def ask(
        whom: Annotated[str, typer.Argument(help="Whom.")],
        loudly: Annotated[str, typer.Option(envvar="HOW", help="How loud.")] = "so",
        wait: Annotated[bool, typer.Option("--wait/--no-wait", help="For how long.")] = True,
    ) -> None:
        """Ask."""

    @small.command("tell")
    def tell() -> None:
        """Tell."""

    part = command_line(typer.main.get_command(small)).partition("## `flotilla ask`")[2]
    assert "```text\nflotilla ask WHOM [OPTIONS]\n```" in part
    assert "More of it." in part
    assert "- `--loudly LOUDLY` (default `so`): How loud. Default: the variable `HOW`.\n" in part
    assert "- `WHOM` (required): Whom.\n" in part
    assert "- `--wait`, `--no-wait` (default `True`): For how long.\n" in part


def test_an_option_of_several_commands_is_described_once():
    page = command_line(GROUP)
    common = entries(page, "Options of several commands")
    assert "`--json`" in {name for name, *_ in common}
    assert page.count("Print one JSON object, and nothing else, to standard output.") == 1
    assert "(#options-of-several-commands): `--" in page
