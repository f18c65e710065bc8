"""The command `flotilla doctor`: parse and call."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.endings import ended
from pipelines.options import AsJson, Assignments, Config, Workdir
from pipelines.remote_options import CaFile, CookiesFile, Endpoint, TokenFile


def doctor(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    endpoint: Endpoint = "",
    token_file: TokenFile = "",
    cookies_file: CookiesFile = "",
    ca_file: CaFile = "",
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Look at the cluster whatever cluster.launcher is.")
    ] = False,
    service_account: Annotated[
        str,
        typer.Option(
            metavar="[NAMESPACE:]NAME",
            help="As whom runs started from the KFP UI speak; pipeline-runner when left out.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Find out what is wrong before a GPU is asked for; nothing is changed."""
    from pipelines.doctor import command, instances

    instance = instances.Instance(
        endpoint=endpoint, token_file=token_file, cookies_file=cookies_file, ca_file=ca_file
    )
    request = command.Request(
        config=config,
        assignments=tuple(assignments or ()),
        workdir=workdir,
        instance=instance,
        kubernetes=kubernetes,
        service_account=service_account,
        as_json=as_json,
    )
    ended(lambda: command.run(request), as_json)
