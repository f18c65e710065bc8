"""`make setup`: uv installs with pip's settings; pip is the fallback."""

import json
import os
import runpy
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.wheels import write_wheel

SCRIPT = runpy.run_path(str(ROOT / ".ci" / "uv.py"))
#: A uv that records its arguments and environment, and exits with the given code.
RECORDER = """
import json, os, sys
with open(os.environ["RECORD"], "w") as file:
    json.dump({"arguments": sys.argv[1:], "environment": dict(os.environ)}, file)
sys.exit(int(os.environ["UV_ENDS_WITH"]))
"""


def test_a_section_and_the_environment_take_precedence_as_in_pip():
    listed = """\
:env:.timeout='7'
global.cert='/a.pem'
global.index-url='https://one.example/simple'
global.timeout='5'
install.index-url='https://two.example/simple'
install.find-links='\\n/wheels\\nhttps://wheels.example'
download.index-url='https://three.example/simple'
"""
    assert SCRIPT["read_pip_settings"](listed) == {
        "cert": "/a.pem",
        "index-url": "https://two.example/simple",
        "find-links": "\n/wheels\nhttps://wheels.example",
        "timeout": "7",
    }


@pytest.mark.parametrize(
    ("pip", "environment", "expected"),
    [
        ({}, {"UV_NO_CACHE": "1"}, {"UV_NO_CACHE": "1"}),
        (
            {"index-url": "https://a.example"},
            {},
            {"UV_DEFAULT_INDEX": "https://a.example"},
        ),
        (
            {"index-url": "https://a.example"},
            {"UV_INDEX_URL": "https://b.example"},
            {"UV_INDEX_URL": "https://b.example"},
        ),
        ({"extra-index-url": "\nhttps://a\nhttps://b"}, {}, {"UV_INDEX": "https://a https://b"}),
        ({"cert": "/a.pem"}, {"SSL_CERT_FILE": "/b.pem"}, {"SSL_CERT_FILE": "/a.pem"}),
        ({"cert": "/"}, {}, {"SSL_CERT_DIR": "/"}),
        (
            {},
            {"REQUESTS_CA_BUNDLE": "/a.pem"},
            {"REQUESTS_CA_BUNDLE": "/a.pem", "SSL_CERT_FILE": "/a.pem"},
        ),
        ({"client-cert": "/c.pem"}, {}, {"SSL_CLIENT_CERT": "/c.pem"}),
        ({"trusted-host": "a b:8080"}, {}, {"UV_INSECURE_HOST": "a b:8080"}),
        ({"keyring-provider": "subprocess"}, {}, {"UV_KEYRING_PROVIDER": "subprocess"}),
        ({"keyring-provider": "import"}, {}, {}),
        ({"default-timeout": "180"}, {}, {"UV_HTTP_TIMEOUT": "180"}),
        ({"timeout": "60", "default-timeout": "180"}, {}, {"UV_HTTP_TIMEOUT": "60"}),
        ({"retries": "9"}, {}, {"UV_HTTP_RETRIES": "9"}),
    ],
)
def test_settings_of_pip_become_variables_of_uv(pip, environment, expected):
    always = {"UV_SYSTEM_CERTS": "true", "UV_INDEX_STRATEGY": "unsafe-best-match"}
    assert SCRIPT["uv_variables"](pip, environment) == always | expected


@pytest.mark.parametrize("written", ["proxy.example:3128", "http://proxy.example:3128"])
def test_the_proxy_of_pip_takes_precedence_over_that_of_the_environment(written):
    found = SCRIPT["uv_variables"]({"proxy": written}, {"https_proxy": "http://other"})
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    assert {found[name] for name in names} == {"http://proxy.example:3128"}


def test_a_missing_folder_of_wheels_is_left_out(tmp_path):
    places = f"{tmp_path} {tmp_path}/missing https://wheels.example"
    found = SCRIPT["uv_variables"]({"find-links": places}, {})
    assert found["UV_FIND_LINKS"] == f"{tmp_path},https://wheels.example"


@pytest.fixture
def place(tmp_path):
    """A folder with a Python that has only pip, and with wheels and their locks."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(distribution("pip").locate_file("pip")))
    (tmp_path / "wheels").mkdir()
    for lock, name in (("given.lock", "given"), ("requirements-build.lock", "builder")):
        wheel = write_wheel(tmp_path / "wheels", name)
        (tmp_path / lock).write_text(pin(name, wheel.read_bytes()))
    return tmp_path


def pin(name, content):
    return f"{name}==1 \\\n    --hash=sha256:{sha256(content).hexdigest()}\n"


def add_uv(place, content=None):
    wheel = write_wheel(place / "wheels", "uv", RECORDER)
    with (place / "requirements-build.lock").open("a") as lock:
        lock.write(pin("uv", content or wheel.read_bytes()))
    return wheel


def install(place, *arguments, ends_with=0):
    """Run the script offline; return its process and the record of uv, if any."""
    given = arguments or ("pip", "install", "--require-hashes", "--requirement", "given.lock")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels", "PIP_CONFIG_FILE": os.devnull}
    record = place / "record"
    ended = subprocess.run(
        [place / "venv" / "bin" / "python", ROOT / ".ci" / "uv.py", *given],
        cwd=place,
        env={**own, **settings, "RECORD": str(record), "UV_ENDS_WITH": str(ends_with)},
        check=False,
        capture_output=True,
        text=True,
    )
    return ended, json.loads(record.read_text()) if record.exists() else None


def installed(place):
    return {path.name for path in place.glob("venv/lib/python*/site-packages/*.py")}


@pytest.mark.slow
def test_uv_is_installed_and_run_with_the_settings(place):
    add_uv(place)
    ended, record = install(place)
    assert (ended.returncode, ended.stderr) == (0, "")
    given = ["--quiet", "pip", "install", "--require-hashes", "--requirement", "given.lock"]
    python = str(place / "venv" / "bin" / "python")
    assert record["arguments"] == [*given, "--no-index", "--python", python]
    assert record["environment"]["UV_FIND_LINKS"] == "wheels"
    assert installed(place) == {"builder.py", "uv.py"}


@pytest.mark.slow
def test_pip_installs_where_the_index_has_no_uv(place):
    add_uv(place).unlink()
    ended, record = install(place)
    assert (ended.returncode, record) == (0, None), ended.stderr
    assert "has no uv for this platform: pip installs the packages instead" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert installed(place) == {"builder.py", "given.py"}


@pytest.mark.slow
def test_pip_installs_what_uv_could_not(place):
    add_uv(place)
    ended, record = install(place, ends_with=2)
    assert ended.returncode == 0, ended.stderr
    assert record
    assert ended.stderr.startswith("uv failed (see above): pip installs the packages instead")
    assert installed(place) == {"builder.py", "given.py", "uv.py"}


@pytest.mark.slow
def test_a_uv_with_another_hash_ends_the_installation(place):
    add_uv(place, b"other")
    ended, record = install(place)
    assert (ended.returncode, record) == (1, None)
    assert "DO NOT MATCH THE HASHES" in ended.stderr
    assert "given.py" not in installed(place)


@pytest.mark.slow
def test_the_locks_are_written_by_uv_alone(place):
    add_uv(place).unlink()
    ended, _ = install(place, "pip", "compile", "pyproject.toml")
    assert ended.returncode == 1
    assert ended.stderr == (
        "The index has no uv for this platform, and pip cannot do this: "
        "uv pip compile pyproject.toml\n"
    )
