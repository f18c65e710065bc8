"""The command `flotilla doctor`: parse and call."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.exit import ended
from pipelines.cli.options import (
    AsJson,
    Assignments,
    CaFile,
    Config,
    CookiesFile,
    Endpoint,
    Image,
    TokenFile,
    Workdir,
)

_Namespace = Annotated[
    str,
    typer.Option(
        "-n",
        "--namespace",
        help="Of the steps and, where cluster.kubernetes names none, of the job; KFP_NAMESPACE, "
        "or that of the kubeconfig, when left out.",
    ),
]
_ServiceAccount = Annotated[
    str,
    typer.Option(
        metavar="[NAMESPACE:]NAME",
        help="As whom runs started from the KFP UI speak; pipeline-runner when left out.",
    ),
]


def doctor(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    endpoint: Endpoint = "",
    namespace: _Namespace = "",
    token_file: TokenFile = "",
    cookies_file: CookiesFile = "",
    ca_file: CaFile = "",
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Look at the cluster whatever cluster.launcher is.")
    ] = False,
    service_account: _ServiceAccount = "",
    image: Image = "",
    as_json: AsJson = False,
) -> None:
    """Find out what is wrong before a GPU is asked for; nothing is changed."""
    from pipelines.cli import doctor_display
    from pipelines.doctor import kfp_instance

    instance = kfp_instance.Instance(
        endpoint=endpoint,
        namespace=namespace,
        token_file=token_file,
        cookies_file=cookies_file,
        ca_file=ca_file,
    )
    request = doctor_display.Request(
        config=config,
        assignments=tuple(assignments or ()),
        workdir=workdir,
        instance=instance,
        kubernetes=kubernetes,
        service_account=service_account,
        image=image,
        as_json=as_json,
    )
    ended(lambda: doctor_display.run(request), as_json)
