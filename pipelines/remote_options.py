"""Arguments and options of the commands that talk to a KFP instance."""

from typing import Annotated

import typer

Endpoint = Annotated[
    str,
    typer.Option(metavar="URL", help="The KFP instance; KF_PIPELINES_ENDPOINT when left out."),
]
Namespace = Annotated[
    str, typer.Option("-n", "--namespace", help="Where several users share it; or KFP_NAMESPACE.")
]
TokenFile = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="File with a bearer token; or KFP_EXISTING_TOKEN, KF_PIPELINES_SA_TOKEN_PATH.",
    ),
]
CookiesFile = Annotated[
    str,
    typer.Option(metavar="FILE", help="File with the session's Cookie header; or KFP_COOKIES."),
]
CaFile = Annotated[
    str,
    typer.Option(metavar="FILE", help="PEM of the authority behind its TLS; or KFP_CA_FILE."),
]
