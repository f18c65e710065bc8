"""Fixtures for all tests: a fixed environment, loopback only, no process left behind."""

import errno
import functools
import gc
import importlib
import inspect
import ipaddress
import logging
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.main
from hypothesis import HealthCheck, settings

from flotilla.trainer.config import load
from tests.clocks import Clock
from tests.marked import may_match
from tests.ports import held_port

pytest_plugins = ["tests.stores.fixtures"]
ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
KEPT = {"FLOTILLA_MNIST_DIR", "FLOTILLA_GOLDEN", "FLOTILLA_CANCELS"}
FOREIGN = (
    "FLOTILLA_", "KFP_", "KF_PIPELINES_", "TF_", "TFDS_", "CUDA_VISIBLE_DEVICES",
    "STORAGE_EMULATOR_HOST", "AWS_", "GOOGLE_", "MLFLOW_", "accesskey", "secretkey",
)  # fmt: skip
TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "PY_COLORS")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# Maximum time to wait until a process exits, in seconds; long enough for a busy machine.
SECONDS_TO_END = 60


def _clear_environment() -> None:
    """Remove the settings of this machine from the environment of this process and its children."""
    for name in list(os.environ):
        foreign = name.startswith(FOREIGN) and name not in KEPT
        if foreign or name in TERMINAL or name.lower() in PROXIES:
            del os.environ[name]
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", NO_COLOR="1", COLUMNS="100", TZ="UTC")
    # Without these variables, object store clients would request the credentials of the machine.
    os.environ.update(NO_GCE_CHECK="true", AWS_EC2_METADATA_DISABLED="true")
    # Processes that a shell starts in the background ignore SIGINT, and so do their children.
    # Handle SIGINT again.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stack(context: int = 0) -> list[inspect.FrameInfo]:
    """Return the frames of `inspect.stack` without looking up modules and source files.

    KFP calls it 50 times per compilation, which takes a second if TensorFlow is loaded.
    """
    del context
    current = inspect.currentframe()
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in traceback.walk_stack(current and current.f_back)
    ]


inspect.stack = _stack
# Skip fsync, which takes seconds on a busy disk. Tests kill processes but not the machine, so data
# in the page cache survives.
os.fsync = lambda _descriptor: None
# Cache the command, because each call would rebuild it from all commands and options.
typer.main.get_command = functools.cache(typer.main.get_command)
# Cache parsed YAML, because most tests of a command read the same few configurations, and parsing
# one takes 20 ms. An error is not cached.
_load = load._load
_pickled = functools.lru_cache(256)(lambda text, path: pickle.dumps(_load(text, path)))
load._load = lambda text, path=(): pickle.loads(_pickled(text, tuple(path)))
# Clear the environment before any test module is imported, because TensorFlow reads its variables
# only once.
_clear_environment()

# Tests must not fail on a busy machine or differ between runs of the same commit.
# `--hypothesis-profile=random` tries other examples.
settings.register_profile(
    "same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("random", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as found:
        yield found


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of a file in which `-m` selects no test; an import can take a second."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (is_test and not _is_selected(collection_path, config)) or None


@functools.cache
def _is_selected(path: Path, config: pytest.Config) -> bool:
    return may_match(path.read_text(encoding="utf-8"), config.option.markexpr)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Disable the garbage collector during collection, because imports create little garbage."""
    gc.disable()
    try:
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            _import_share(session.config)
        return (yield)
    finally:
        gc.enable()
        # These objects are never freed, so later garbage collections can skip them.
        gc.freeze()


def _import_share(config: pytest.Config) -> None:
    """Import a share of the test modules in each worker, so that each is rewritten only once.

    pytest rewrites assertions on import. In a fresh clone, all workers would otherwise rewrite
    every module at the same time.
    """
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not name:
        return
    ignored = [ROOT / each for each in config.getoption("ignore") or ()]
    paths = [
        path.relative_to(ROOT)
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        if not any(path.is_relative_to(each) for each in ignored) and _is_selected(path, config)
    ]
    for path in paths[int(name.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        # The collection imports the module again and reports its error.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reject a test with a marker that its file does not name, because `-m` would skip the file."""
    for mark in ("slow", "long", "cluster"):
        for path in {item.path for item in items if item.get_closest_marker(mark)}:
            if f"mark.{mark}" not in path.read_text(encoding="utf-8"):
                raise pytest.UsageError(f"write pytest.mark.{mark} in {path}: `-m` reads it there")


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Run the garbage collector between two test files.

    Otherwise a server thread in a later test might collect TensorFlow objects, and block.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    folder = Path(os.environ.get("FLOTILLA_MNIST_DIR", ROOT / "../shared/data/mnist")).resolve()
    absent = [name for name in MNIST_FILES if not (folder / name).is_file()]
    if absent:
        pytest.skip(f"FLOTILLA_MNIST_DIR={folder} lacks the official {', '.join(absent)}")
    return folder


@pytest.fixture
def golden() -> Callable[..., None]:
    """Return a function that compares a text with a golden file. `make golden` writes the file."""

    def check(name: str, text: str, folder: Path = GOLDEN) -> None:
        path = folder / name
        if os.environ.get("FLOTILLA_GOLDEN") == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: run `make golden`"
        assert path.read_text(encoding="utf-8") == text, f"{path} differs: see `make golden`"

    return check


def _is_outside(host: object) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    if not isinstance(name, str) or name in {"", "localhost", socket.gethostname()}:
        return False
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return True
    return not (address.is_loopback or address.is_unspecified or str(address) in _own_addresses())


def _own_addresses() -> set[str]:
    """Return the addresses of this machine, which tests may connect to."""
    return {
        each.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in {socket.AF_INET, socket.AF_INET6}
    }


@pytest.fixture(autouse=True)
def _formatters() -> Iterator[None]:
    """Restore the formatters of pytest's handlers, which a pipeline step in a test may replace."""
    before = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    yield
    for handler, formatter in before:
        handler.setFormatter(formatter)


@pytest.fixture(autouse=True)
def outside_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuse connections to other machines, and fail a test that tries one."""
    attempts: list[str] = []

    def guard(owner: Any, name: str, host_of: Callable[..., object]) -> None:
        real = getattr(owner, name)

        def guarded(*args: Any, **named: Any) -> Any:
            host = host_of(*args, **named)
            if _is_outside(host):
                attempts.append(str(host))
                raise OSError(errno.ENETUNREACH, f"tests stay on loopback: {host} was refused")
            return real(*args, **named)

        monkeypatch.setattr(owner, name, guarded)

    def peer(sock: socket.socket, address: Any) -> object:
        return address[0] if sock.family in {socket.AF_INET, socket.AF_INET6} else None

    guard(socket.socket, "connect", peer)
    guard(socket.socket, "connect_ex", peer)
    guard(socket, "getaddrinfo", lambda host, *_, **__: host)
    yield attempts
    assert not attempts, f"the test tried to leave this machine: {', '.join(attempts)}"


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test marked `cluster` that leaves a process behind, and kill that process."""
    if not request.node.get_closest_marker("cluster"):
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [process for process in _started(folder) if process not in before]
    names = {process.pid: _command(process) for process in left}
    _, alive = psutil.wait_procs(left, timeout=SECONDS_TO_END)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=SECONDS_TO_END)
    found = "; ".join(f"{process.pid} {names[process.pid]}" for process in alive)
    assert not alive, f"still running {SECONDS_TO_END} s after the test: {found}"


def _started(folder: Path) -> list[psutil.Process]:
    """Return the descendants of this process, and orphans whose command line names the folder."""
    family = psutil.Process().children(recursive=True)
    orphans = [p for p in psutil.process_iter() if p not in family and str(folder) in _command(p)]
    return [p for p in family + orphans if "resource_tracker" not in _command(p)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
