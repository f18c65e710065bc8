"""Arguments and options that several commands share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from flotilla.pipelines.cli.completion import complete_assignments, complete_runs
from flotilla.pipelines.cli.exit import copy_signature, warn
from flotilla.pipelines.runs.kfp_access import Instance

RUNS = Path("runs")
Config = Annotated[str | None, typer.Argument(metavar="CONFIG|SOURCE",
    help="The YAML configuration file of the run, or the training data: a file, a folder, a "
    "URI or a pattern. Default: configs/digits.yaml.")]  # fmt: skip
FormConfig = Annotated[str | None, typer.Argument(metavar="CONFIG|SOURCE",
    help="The YAML configuration file of a run, or the training data. The run parameters get "
    "their default values from it. Default: configs/digits.yaml.")]  # fmt: skip
Label = Annotated[list[str] | None, typer.Option("--label", metavar="COLUMN",
    help="The column of SOURCE to predict. May be repeated.")]  # fmt: skip
Assignments = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE",
    help="Override one key of the configuration. May be repeated.",
    autocompletion=complete_assignments)]  # fmt: skip


def local_path(given: str | Path) -> Path:
    """Return the path given by an option. An empty string or a URI is a usage error."""
    text = str(given)
    # Reject an empty string, because it may come from an unset shell variable.
    if not text.strip():
        raise typer.BadParameter("the path is empty; give a path or omit the option")
    if "://" in text:
        raise typer.BadParameter(
            f"{text!r} is not a path on this machine; to publish to a URI, set storage.root"
        )
    try:
        os.lstat(text)
    except (FileNotFoundError, NotADirectoryError):
        return Path(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a valid file name"
        raise typer.BadParameter(f"cannot access {text!r}: {reason}") from None
    return Path(text)


Workdir = Annotated[Path, typer.Option(metavar="DIR", parser=local_path,
    help="The folder for the output of runs. If storage.root is set, results are published "
    "below that URI instead.")]  # fmt: skip
Code = Annotated[Path | None, typer.Option(metavar="DIR", parser=local_path,
    help="The folder with your Python modules, such as the module that model.name refers to.")
]  # fmt: skip
Resume = Annotated[str | None, typer.Option(metavar="RUN", help="The id of a run to resume.",
    autocompletion=complete_runs)]  # fmt: skip
Dataset = Annotated[str, typer.Option(metavar="URI", help="The published dataset to train on.")]
Root = Annotated[str, typer.Option(metavar="URI", help="The storage root. Default: the workdir.")]

Run = Annotated[str, typer.Argument(metavar="RUN", help="The id or the name of the run.",
    autocompletion=complete_runs)]  # fmt: skip
RunsDir = Annotated[Path, typer.Option(metavar="DIR", parser=local_path,
    help="The folder that contains the runs of this machine.")]  # fmt: skip
Cron = Annotated[str, typer.Option(metavar="CRON",
    help="A cron expression with five fields, or six with seconds first.")]  # fmt: skip
Every = Annotated[str, typer.Option(metavar="TIME",
    help="The time between two starts, such as 90s, 30m, 6h or 1d.")]  # fmt: skip
Timezone = Annotated[str, typer.Option(metavar="ZONE", help="The time zone of --cron.")]
Latest = Annotated[
    bool, typer.Option("--latest", help="Start each run with the newest version of the pipeline.")
]
CatchUp = Annotated[bool, typer.Option("--catch-up", help="Start missed runs as soon as possible.")]
AtOnce = Annotated[int, typer.Option(help="The maximum number of concurrent runs.", min=1, max=10)]
Image = Annotated[str, typer.Option(metavar="IMAGE",
    help="The container image of all steps and training tasks. Default: the image of this "
    "Flotilla version.")]  # fmt: skip


def _text(metavar: str | None, text: str, *names: str) -> Any:
    return Annotated[str, typer.Option(*names, metavar=metavar, help=text)]


def _texts(name: str, metavar: str, text: str) -> Any:
    return Annotated[
        list[str] | None, typer.Option(name, metavar=metavar, help=f"{text} May be repeated.")
    ]


_INSTANCE = {
    "endpoint": _text("URL", "The URL of the KFP instance. Default: KF_PIPELINES_ENDPOINT."),
    "namespace": _text(None, "The namespace on a multi-user instance. Default: KFP_NAMESPACE.",
        "-n", "--namespace"),
    "token_file": _text("FILE",
        "A file with a bearer token. Default: the token in KFP_EXISTING_TOKEN, or else the file "
        "that KF_PIPELINES_SA_TOKEN_PATH names."),
    "cookies_file": _text("FILE",
        "A file with the Cookie header of a session. Default: the header in KFP_COOKIES."),
    "ca_file": _text("FILE",
        "A PEM file with the CA certificate of the instance. Default: KFP_CA_FILE."),
    "ui": _text("URL",
        "The URL of the KFP user interface, for links. Default: FLOTILLA_KFP_UI, or else the "
        "endpoint, if it also serves the UI.", "--ui"),
}  # fmt: skip
_TARGET = {
    "pipeline": _text("NAME", "The name of the uploaded pipeline."),
    "version": _text(None, "The name or id of the pipeline version. Default: the newest version."),
    "experiment": _text("NAME",
        "The KFP experiment that the run belongs to. It is created if it does not exist."),
    "pipeline_root": _text("URI",
        "The URI below which KFP stores artifacts. Default: as set on the instance."),
    "service_account": _text("NAME",
        "The service account of the pods. Default: the account that the instance uses."),
    "image": _text("IMAGE",
        "The container image of all steps and training tasks. Default: the image of the pipeline."),
}  # fmt: skip
_PODS = {
    "cpu": _text("CPUS",
        "The CPU request and limit of each step that handles data or a model. Default: 1."),
    "memory": _text("SIZE",
        "The memory request and limit of each step that handles data or a model. Default: 4Gi."),
    "gpus": _text("N", "The number of GPUs for evaluate-model and for export-model. Default: 0."),
    "node_selector": _texts("--node-selector", "KEY=VALUE",
        "A label that a node must have to run a step that handles data or a model."),
    "tolerations": _texts("--toleration", "YAML",
        "A Kubernetes toleration, as YAML, for the steps that handle data or a model."),
    "store_secret": _text("NAME",
        "The secret with the access keys of the object store. Default: mlpipeline-minio-artifact."),
    "pull_secrets": _texts("--pull-secret", "NAME", "An image pull secret for the steps."),
    "mounts": _texts("--mount", "CLAIM:FOLDER",
        "A persistent volume claim for data.manual_dir, and the folder where prepare-data mounts "
        "it."),
    "scratch": _text("SIZE",
        "The size limit of /tmp in each step that handles data or a model, such as 50Gi."),
    "labels": _texts("--pod-label", "KEY=VALUE",
        "A label to add to the pods of all steps, such as the queue label of Kueue."),
    "variables": _texts("--env", "NAME=VALUE",
        "An environment variable for the steps. Do not use it for a secret."),
}  # fmt: skip
_DEFAULTS = {
    "pipeline": "flotilla-training", "experiment": "flotilla", "workdir": RUNS, "parallel": 1,
    "model": inspect.Parameter.empty,
}  # fmt: skip


def add_instance_options(command: Callable[..., Any], **own: Any) -> Callable[..., Any]:
    """Replace the parameter `instance` with options. `own` overrides some of them."""
    options = {name: own.get(name, option) for name, option in _INSTANCE.items()}

    def made(**named: str) -> Instance:
        instance = Instance(**named)
        if remark := instance.plain_http_remark():
            warn(remark)
        return instance

    return group_options(command, "instance", options, made)


def add_submission_options(command: Callable[..., Any], *only: str) -> Callable[..., Any]:
    """Replace the parameter `target` with options for fields of a `Submission`, or `only` these."""
    options = {name: option for name, option in _TARGET.items() if name in (only or _TARGET)}
    return group_options(command, "target", options)


def add_pod_options(command: Callable[..., Any], *only: str) -> Callable[..., Any]:
    """Replace the parameter `pods` with options for the steps' pods: all, or `only` these."""
    options = {name: option for name, option in _PODS.items() if name in (only or _PODS)}

    def made(**named: Any) -> Any:
        from flotilla.pipelines.step_settings import step_pods

        return step_pods(**{name: value for name, value in named.items() if value})

    grouped = group_options(command, "pods", options, made)
    if "label" not in inspect.signature(command).parameters or "labels" not in options:
        return grouped

    def called(**named: Any) -> Any:
        given = named["label"] or ()
        # Also accept `--label KEY=VALUE`, which set a label of the pods in earlier versions.
        add_pod_options = [each for each in given if "=" in each]
        named["labels"] = [*(named["labels"] or ()), *add_pod_options]
        named["label"] = [each for each in given if "=" not in each]
        return grouped(**named)

    return copy_signature(called, grouped, [])


def group_options(
    command: Callable[..., Any],
    parameter: str,
    options: Mapping[str, Any],
    made: Callable[..., Any] = dict,
    **defaults: Any,
) -> Callable[..., Any]:
    """Replace a parameter of a command with options, and let `made` compute its value from them."""

    def called(**named: Any) -> Any:
        value = made(**{name: named.pop(name) for name in options})
        return command(**{parameter: value}, **named)

    known = {**_DEFAULTS, **defaults}
    more = []
    for name, option in options.items():
        kind = get_args(option)[0]
        default = known.get(name, kind() if kind in (str, bool, int) else None)
        more.append(
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=option
            )
        )
    return copy_signature(called, command, more, without=parameter)
