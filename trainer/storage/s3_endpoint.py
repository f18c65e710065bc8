"""The endpoint and credentials of an S3-compatible store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from flotilla.trainer.runtime.masking import is_sent_openly
from flotilla.trainer.storage.uri import Location, locate, speaks_s3, web_address

# The object store of a KFP instance in the namespace `kubeflow`.
KFP_ENDPOINT = "http://seaweedfs.kubeflow:9000"
# The Kubernetes secret for KFP's object store, and the names of the keys in the secret.
KFP_SECRET = "mlpipeline-minio-artifact"
KFP_KEYS = ("accesskey", "secretkey")
BOTO_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Environment variables that select credentials other than KFP's secret: a key, a role or a profile.
_OTHERS = (
    BOTO_KEYS[0], "AWS_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)  # fmt: skip
_AMAZON = re.compile(r"\.amazonaws\.com(\.cn)?$")
_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Endpoint:
    """The connection settings of a store. For empty fields, boto3 chooses a value.

    `kfp_secret` indicates whether the keys of KFP's secret may be used: for `minio://`, and for
    `s3://` with an endpoint that is not Amazon's.
    """

    url: str = ""
    region: str = ""
    path_style: bool = False
    kfp_secret: bool = False


def find_endpoint(location: Location) -> Endpoint:
    """Return the endpoint from the URI or, failing that, from the environment or the default."""
    minio = location.scheme == "minio"
    given = {f"the endpoint of {location.home}": _add_scheme(location)}
    given |= {name: os.environ.get(name, "") for name in _VARIABLES}
    found = next((web_address(url, where) for where, url in given.items() if url), "")
    url = found or (KFP_ENDPOINT if minio else "")
    return Endpoint(
        url=url,
        region=location.option("region"),
        path_style=bool(url) or location.is_on("s3ForcePathStyle", "use_path_style"),
        kfp_secret=minio or (bool(url) and not _AMAZON.search(urlsplit(url).hostname or "")),
    )


def plain_http_remark(uri: str) -> str:
    """Return a warning if data at a URI is sent unencrypted, or an empty string."""
    if not speaks_s3(uri):
        return ""
    url = find_endpoint(locate(uri)).url
    if url == KFP_ENDPOINT or not is_sent_openly(url):
        return ""
    return (
        f"{url} uses plain HTTP: others on the network can read the data and session tokens; "
        "use https"
    )


def kfp_credentials() -> Mapping[str, str]:
    """Return the keys of KFP's secret, or {} if the environment selects other credentials."""
    keys = [os.environ.get(name, "") for name in KFP_KEYS]
    if not all(keys) or any(map(os.environ.get, _OTHERS)):
        return {}
    return {"aws_access_key_id": keys[0], "aws_secret_access_key": keys[1]}


def _add_scheme(location: Location) -> str:
    endpoint = location.option("endpoint")
    if not endpoint or "://" in endpoint:
        return endpoint
    plain = location.is_on("disableSSL", "disable_https")
    return f"{'http' if plain else 'https'}://{endpoint}"
