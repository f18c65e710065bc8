"""Checks of the claims in a document: every command, setting and path exists.

Each check returns the reason of a failure, or an empty string.
"""

import re
import tomllib
from itertools import pairwise

import typer

from flotilla.pipelines.cli.app import app
from flotilla.pipelines.sweeps import SweepOptions, plan_sweep
from flotilla.trainer.__main__ import _parser
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT
from tests.house_rules.source import files, text

GROUP = typer.main.get_command(app)
# `flotilla/x` may also be the name of an annotation or a label.
TOP = {path.parts[0] for path in files()} - {"flotilla"}
TARGETS = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
VARIABLES = set(re.findall(r"\$\(([A-Z]+)\)", text("Makefile")))
EXTRAS = set(tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"])
FLOTILLA = {"flotilla", ".venv/bin/flotilla"}


def refusal(words, *, whole=True):
    """Return why the command line would refuse these words, or "".

    Unless `whole` is set, required arguments may be missing, as in prose.
    """
    command, path, rest = GROUP, "flotilla", list(words[1:])
    while below := getattr(command, "commands", None):
        if not rest or rest[0] == "--version":
            return "" if rest or not whole else f"{path}: no command"
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
    if path == "flotilla sweep" and whole:
        return wrong_space(context.params)
    return wrong_settings(context.params)


def wrong_space(params):
    if params["resume"]:
        return ""
    if params["auto"]:
        return wrong_settings(params)
    options = SweepOptions(
        config=params["config"],
        settings=tuple(params["assignments"] or ()),
        random=params["random"],
        halving=params["halving"],
    )
    try:
        plan_sweep(options)
    except ConfigError as error:
        return str(error)
    return ""


def wrong_settings(params):
    path = params.get("config")
    if path and str(path).startswith("configs/") and not (ROOT / path).is_file():
        return f"there is no {path}"
    # If the configuration file is not in the repository, the settings must be valid for the digits
    # configuration or without a configuration.
    is_here = bool(path) and (ROOT / path).is_file() and str(path).endswith((".yaml", ".yml"))
    refusals = []
    for base in [ROOT / path] if is_here else [ROOT / "configs/digits.yaml", None]:
        try:
            load_config(base, params.get("assignments") or ())
        except ConfigError as error:
            refusals.append(str(error))
        else:
            return ""
    return refusals[0]


def wrong_make(words):
    for word in words[1:]:
        name, is_variable, value = word.partition("=")
        if name not in (VARIABLES if is_variable else TARGETS):
            return f"make knows no {name}"
        given = refusal(["flotilla", "run", *value.split()]) if name == "ARGS" else ""
        if "run" in words and given:
            return given
    return ""


def wrong_task(words):
    try:
        _parser().parse_args(words[words.index("flotilla.trainer") + 1 :])
    except SystemExit as end:
        return "" if not end.code else "python -m flotilla.trainer refuses it"
    return ""


def wrong_command(words, *, whole=True):
    """Return why a command is wrong, or ""; commands of other programs are not checked."""
    if words[0] in FLOTILLA:
        return refusal(words, whole=whole)
    if words[0] == "make":
        return wrong_make(words)
    if words[0] == "kubectl":
        return wrong_kubectl(words)
    if words[0] == "pip" and "install" in words:
        return wrong_install(words)
    if words[0] == "python" and "flotilla.trainer" in words and whole:
        return wrong_task(words)
    return ""


def wrong_kubectl(words):
    folders = [
        after
        for word, after in pairwise(words)
        if word == "--kustomize" and after.startswith("deploy/")
    ]
    missing = [each for each in folders if not (ROOT / each / "kustomization.yaml").is_file()]
    return f"there is no {missing[0]}" if missing else ""


def wrong_install(words):
    for word in words:
        package, bracket, extra = word.partition("[")
        if bracket and package == "kfp-flotilla" and extra.rstrip("]") not in EXTRAS:
            return f"there is no extra {extra.rstrip(']')}"
        if package == "flotilla" and "uninstall" not in words:
            return "the distribution is kfp-flotilla"
    return ""


def wrong_key(word):
    """Return why a configuration key, with or without a value, is invalid, or ""."""
    key, _, value = word.partition(": ")
    if value:
        try:
            load_config(None, [f"{key}={value}"])
        except ConfigError as error:
            # Inline code may set one key without the other keys that it requires.
            is_wrong = any(words in str(error) for words in ("no such key", " is not allowed"))
            return str(error) if is_wrong else ""
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
    """Return whether a word looks like a path of this repository but does not exist."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word) or word.split("/")[0] not in TOP:
        return False
    return not any(ROOT.glob(word.rstrip("/")))
