"""Runs uv with pip's settings: `python .ci/uv.py pip install ...`.

First, pip installs uv and setuptools from `requirements-build.lock`. uv does not read pip's
configuration, so the index, the certificates, the proxy and other settings are passed as
environment variables. If uv cannot install packages, pip does.
"""

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUILD_LOCK = Path("requirements-build.lock")
PIP = [sys.executable, "-W", "ignore", "-m", "pip", "--disable-pip-version-check"]
SLOWER = "pip installs the packages instead, which takes minutes longer"


def read_pins(lock: str) -> dict[str, str]:
    """Return each pin of a lock file with its hashes, by package name."""
    pins: dict[str, str] = {}
    name = ""
    for line in lock.splitlines(keepends=True):
        if "==" in line:
            name = line.partition("==")[0]
        if name:
            pins[name] = pins.get(name, "") + line
    return pins


def is_installed(name: str, pin: str) -> bool:
    """Return whether this Python has the pinned version."""
    try:
        return pin.split(maxsplit=1)[0] == f"{name}=={version(name)}"
    except PackageNotFoundError:
        return False


def install_build_tools(pins: dict[str, str]) -> bool:
    """Install the pins with pip; return whether the index has uv for this platform."""
    missing = {name: pin for name, pin in pins.items() if not is_installed(name, pin)}
    for name in sorted(missing, key="uv".__eq__):
        with tempfile.NamedTemporaryFile("w", suffix=".lock") as lock:
            lock.write(missing[name])
            lock.flush()
            options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
            done = subprocess.run(
                [*PIP, "install", *options, "--requirement", lock.name],
                check=False,
                capture_output=True,
                text=True,
            )
        if name == "uv" and "No matching distribution found for uv" in done.stderr:
            return False
        if done.returncode:
            sys.exit(done.stderr.strip())
    return True


def read_pip_settings(listed: str) -> dict[str, str]:
    """Return the settings of `pip install` from the output of `pip config list`."""
    found: dict[str, str] = {}
    settings = [line.partition("=") for line in listed.splitlines() if "=" in line]
    for section in ("global.", "install.", ":env:."):
        for key, _, value in settings:
            if key.startswith(section):
                found[key.removeprefix(section)] = str(ast.literal_eval(value))
    return found


def existing_links(places: str) -> Iterator[str]:
    """Yield the URLs and the existing folders, because uv fails if a folder is missing."""
    for place in places.split():
        if "://" in place or Path(place).expanduser().exists():
            yield place if "://" in place else str(Path(place).expanduser())


def uv_variables(pip: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's settings; variables that are already set take precedence."""
    bundle = environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE", "")
    certificates = pip.get("cert") or bundle
    proxy = pip.get("proxy", "")
    proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    own_index = {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & environment.keys()
    weaker = {
        "UV_SYSTEM_CERTS": "true",
        "UV_DEFAULT_INDEX": "" if own_index else pip.get("index-url", ""),
        "UV_INDEX": " ".join(pip.get("extra-index-url", "").split()),
        # Search all indexes, as pip does, because a mirror may lack the locked version. The locked
        # hashes ensure that a file from another index is not accepted if it differs.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": ",".join(existing_links(pip.get("find-links", ""))),
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", "").split()),
        "UV_KEYRING_PROVIDER": "subprocess" if pip.get("keyring-provider") == "subprocess" else "",
        "UV_HTTP_TIMEOUT": pip.get("timeout") or pip.get("default-timeout", ""),
        "UV_HTTP_RETRIES": pip.get("retries", ""),
        "SSL_CLIENT_CERT": pip.get("client-cert", ""),
    }
    stronger = {"SSL_CERT_DIR" if Path(certificates).is_dir() else "SSL_CERT_FILE": certificates}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        stronger[name] = proxy
    return (
        {name: value for name, value in weaker.items() if value}
        | dict(environment)
        | {name: value for name, value in stronger.items() if value}
    )


def run_uv(arguments: list[str]) -> int:
    """Run uv for this Python with pip's settings; return its exit code."""
    listed = subprocess.run([*PIP, "config", "list"], check=False, capture_output=True, text=True)
    pip = read_pip_settings(listed.stdout)
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        arguments = [*arguments, "--no-index"]
    command = [sys.executable, "-m", "uv", "--quiet", *arguments, "--python", sys.executable]
    return subprocess.run(command, env=uv_variables(pip, os.environ), check=False).returncode


def main(arguments: list[str]) -> int:
    """Run a uv command. If uv cannot install packages, pip does."""
    has_uv = install_build_tools(read_pins(BUILD_LOCK.read_text(encoding="utf-8")))
    code = run_uv(arguments) if has_uv else 1
    if code == 0:
        return 0
    reason = "uv failed (see above)" if has_uv else "The index has no uv for this platform"
    if arguments[:2] != ["pip", "install"]:
        print(f"{reason}, and pip cannot do this: uv {' '.join(arguments)}", file=sys.stderr)
        return code
    print(f"{reason}: {SLOWER}", file=sys.stderr, flush=True)
    return subprocess.run([*PIP, "--quiet", *arguments[1:]], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
