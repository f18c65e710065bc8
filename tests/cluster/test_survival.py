"""What a cluster survives: lost tasks, stalls, cut connections; and the end of training."""

import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster.by_hand import by_hand
from tests.cluster.launched import SECONDS, Launched, launched
from tests.cluster.pods import CHIEF, pods, why_not
from tests.cluster.test_job import PUBLISHED
from tests.pipelines.called import Called, call, calling, setting
from trainer import storage, user_code
from trainer.checkpoints.history import read_history
from trainer.checkpoints.index import newest_checkpoint
from trainer.cluster import completion, liveness, signals, termination
from trainer.cluster.local import held_cluster
from trainer.cluster.supervisor import MAX_GROWTH
from trainer.errors import BEGIN_AGAIN, INTERRUPTED
from trainer.events import AttemptBegin, CheckpointPublished, Progress, Restart, TaskFailed
from trainer.strategies.turns import TURN
from trainer.topology import Cluster, Task
from trainer.training.journal import MAX_ROWS

pytestmark = pytest.mark.cluster

EVERY = 200
# No more: of a longer run the history has no row for every step it may be interrupted at.
STEPS = MAX_ROWS
SETTINGS = {
    "training": {"steps": STEPS, "checkpoint_every": EVERY, "validate_every": 0},
    "cluster": {"parameter_servers": 1, "workers": 2, "max_restarts": 3},
}


def applied(run: Launched) -> int:
    """Return the updates that were applied over all attempts, repeated ones counted each time."""
    total, reached = 0, 0
    for event in run.seen:
        if isinstance(event, AttemptBegin):
            reached = event.global_step
        if isinstance(event, Progress):
            total += event.global_step - reached
            reached = event.global_step
    return total


# More than any machine does before it is interrupted.
ENDLESS = {**SETTINGS, "training": {**SETTINGS["training"], "steps": 10**7}}


@pytest.fixture
def running(dataset, tmp_path):
    with launched(SETTINGS, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 50)
        yield run


@pytest.fixture
def endless(dataset, tmp_path):
    with launched(ENDLESS, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 50)
        yield run


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_training_goes_on(running):
    running.kill("worker-1")
    code, said = running.end()
    assert code == 0, said
    assert [e.task for e in running.events(Restart)] == ["worker-1"]
    assert running.events(Restart)[0].cause == "signal SIGKILL"
    assert len(running.events(AttemptBegin)) == 1
    # One that was under way on the server when its worker died may count as well.
    assert STEPS <= running.newest() <= STEPS + 1


@pytest.mark.slow
def test_a_killed_parameter_server_costs_at_most_the_steps_since_a_checkpoint(running):
    running.kill("ps-0")
    code, said = running.end()
    assert code == 0, said
    assert running.events(AttemptBegin)[-1].global_step % EVERY == 0
    assert running.newest() == STEPS
    assert applied(running) - STEPS <= EVERY


@pytest.mark.slow
def test_a_killed_chief_begins_a_new_attempt_on_the_same_servers(running):
    servers = {name: running.task(name).pid for name in ("ps-0", "worker-0", "worker-1")}
    running.kill("chief-0")
    running.wait_for(lambda event: isinstance(event, AttemptBegin))
    assert servers == {name: running.task(name).pid for name in servers}
    code, said = running.end()
    assert code == 0, said
    assert [e.task for e in running.events(Restart)] == ["chief-0"]
    assert running.newest() == STEPS
    assert applied(running) - STEPS <= EVERY


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_an_interrupt_publishes_a_last_checkpoint(running, number):
    tasks = running.tasks()
    running.process.send_signal(number)
    code, said = running.end()
    assert code == 130
    newest = running.newest()
    assert said == (
        f"interrupted at global step {newest}; checkpoint {running.checkpoints}/step-{newest:08d}\n"
    )
    assert newest == running.history()[-1]["global_step"]
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(endless):
    tasks = endless.tasks()
    endless.task("chief-0").send_signal(signal.SIGSTOP)
    endless.process.send_signal(signal.SIGINT)
    endless.process.send_signal(signal.SIGTERM)
    code, said = endless.end()
    assert code == 130
    assert "interrupted" in said
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


@pytest.mark.slow
def test_no_task_outlives_a_launcher_that_is_killed(endless):
    tasks = endless.tasks()
    assert len(tasks) == 4
    endless.task("worker-0").send_signal(signal.SIGSTOP)
    endless.process.kill()
    endless.process.wait()
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive
    assert endless.newest() % EVERY == 0


@pytest.mark.slow
def test_past_the_limit_of_restarts_the_task_and_its_end_are_named(dataset, tmp_path):
    cluster = {**SETTINGS["cluster"], "max_restarts": 0}
    with launched({**SETTINGS, "cluster": cluster}, dataset, tmp_path) as run:
        run.wait_for_step(50)
        tasks = run.tasks()
        run.kill("worker-0")
        code, said = run.end()
    assert code == 1
    assert said.startswith("worker-0 ended with signal SIGKILL and cluster.max_restarts (0)")
    log = str(tmp_path / "cluster" / "worker-0" / "log.txt")
    assert log in said
    (failed,) = run.events(TaskFailed)
    assert (failed.task, failed.cause) == ("worker-0", "signal SIGKILL")
    assert failed.log == log
    assert failed.last_lines[-1] in said
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


STALLED_STEPS = 1500
STALL_SECONDS = 8


def settings(strategy: str, **cluster: object) -> dict[str, object]:
    training = {
        "strategy": strategy,
        "steps": STALLED_STEPS,
        "checkpoint_every": EVERY,
        "validate_every": 0,
        "stall_timeout": STALL_SECONDS,
    }
    return {"training": training, "cluster": {"workers": 2, "max_restarts": 2, **cluster}}


def stopped(dataset, folder, config, task, waiting=()):
    """Stop a task during training; return the run when it has ended well."""
    with launched(config, dataset, folder) as run:
        run.wait_for_step(EVERY + 1)
        run.task(task).send_signal(signal.SIGSTOP)
        code, said = run.end()
        assert code == 0, said
    assert STALLED_STEPS <= run.newest() <= STALLED_STEPS + 1
    first = run.events(Restart)[0]
    seconds = 2 * STALL_SECONDS if task == "chief-0" else STALL_SECONDS
    assert (first.task, first.cause) in [
        (task, f"no heartbeat for {seconds} s"),
        *((each, f"exit code {BEGIN_AGAIN}") for each in waiting),
    ]
    assert {event.restarts for event in run.events(Restart)} == {1}
    for attempt in run.events(AttemptBegin)[1:]:
        assert attempt.global_step >= EVERY
        assert attempt.global_step % EVERY == 0
    return run


@pytest.mark.slow
@pytest.mark.long
def test_asynchronous_training_goes_on_without_a_stopped_worker(dataset, tmp_path):
    run = stopped(dataset, tmp_path, settings("async_parameter_server"), "worker-1")
    assert len(run.events(AttemptBegin)) == 1


@pytest.mark.slow
@pytest.mark.long
def test_synchronous_updates_do_not_wait_for_a_stopped_worker(dataset, tmp_path):
    run = stopped(dataset, tmp_path, settings("sync_parameter_server"), "worker-1")
    assert len(run.events(AttemptBegin)) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("task", [pytest.param("ps-0", marks=pytest.mark.long), "chief-0"])
def test_a_stopped_server_or_chief_costs_an_attempt(dataset, tmp_path, task):
    run = stopped(dataset, tmp_path, settings("async_parameter_server"), task)
    assert len(run.events(AttemptBegin)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.long
@pytest.mark.parametrize("task", ["worker-0", "worker-1"])
def test_mirrored_workers_begin_again_together(dataset, tmp_path, task):
    config = settings("multi_worker_mirrored", communication="ring")
    run = stopped(dataset, tmp_path, config, task, waiting={"worker-0", "worker-1"} - {task})
    assert len(run.events(AttemptBegin)) == 2
    assert {event.task for event in run.events(Restart)} == {"worker-0", "worker-1"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_towers_begin_again_when_one_of_them_is_stopped(dataset, tmp_path):
    run = stopped(dataset, tmp_path, settings("in_graph"), "worker-0")
    assert len(run.events(AttemptBegin)) == 2


@pytest.mark.slow
@pytest.mark.long
def test_without_a_supervisor_a_waiting_task_names_the_silent_one(dataset, tmp_path):
    waits, stops = (Task(role="worker", index=index) for index in range(2))
    config = settings("multi_worker_mirrored", communication="ring")
    config["training"]["steps"] = 100_000
    with (
        held_cluster({"worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, config) as tasks,
    ):
        for task in (waits, stops):
            tasks.start(task)
        tasks.wait_for(waits, '"event": "progress"')
        tasks.processes[stops].send_signal(signal.SIGSTOP)
        assert tasks.end_of(waits) == BEGIN_AGAIN, tasks.log(waits)
    message = termination.read(tmp_path / str(waits))
    # TensorFlow's own heartbeats may have timed out before.
    assert message.startswith(
        (
            f"no progress for {STALL_SECONDS} s: worker-1 does not answer",
            "a task of the cluster is gone",
        )
    )
    assert "worker-1" in message


NAME = "pod.fleet.test"
# gRPC's own interval between two resolutions is 30 s, and an attempt to connect at most 20 s.
CEILING = 25
MOUNTED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
REJOIN_EVERY = 500
CONFIG = {
    "training": {"steps": 10**7, "checkpoint_every": REJOIN_EVERY, "validate_every": 0},
    "cluster": {"parameter_servers": 1, "workers": 2},
}
ROLES = {"ps": 1, "worker": 2, "chief": 1}
PS, WORKER = Task(role="ps", index=0), Task(role="worker", index=1)


class Relay:
    """Listens at one address, and passes connections on to a port of 127.0.0.1."""

    def __init__(self, address: str, port: int, target: int) -> None:
        self._target = target
        self._sockets = [socket.create_server((address, port))]
        self.port = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close it and all connections, as the end of a process does."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._sockets[0].accept()
                self._sockets.append(caller)
                try:
                    called = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    # Not there yet: the caller tries again.
                    caller.close()
                    continue
                self._sockets.append(called)
                for pair in ((caller, called), (called, caller)):
                    threading.Thread(
                        target=_pass_on, args=(*pair, self._passing()), daemon=True
                    ).start()

    def _passing(self) -> Callable[[], bool]:
        """Return what says whether data of a connection that begins now is passed on."""
        return lambda: True


def _pass_on(source: socket.socket, target: socket.socket, is_passed: Callable[[], bool]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if is_passed():
                target.sendall(data)


def _can_mount() -> bool:
    """Say whether a process may have a file of hosts of its own."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    tried = subprocess.run(
        [*MOUNTED, "mount --bind /etc/hosts /etc/hosts"], capture_output=True, check=False
    )
    return tried.returncode == 0


def _said(
    process: subprocess.Popen[str], log: Path, ceiling: float | None = None
) -> dict[str, int]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ceiling)
    line = process.stdout.readline() if ready else ""
    assert line, log.read_text(encoding="utf-8")[-3000:]
    found: dict[str, int] = json.loads(line)
    return found


@pytest.fixture
def server(tmp_path, port):
    alone = Cluster(addresses={"worker": (f"127.0.0.1:{port}",)})
    settings = {
        **os.environ,
        **signals.parent_environment(),
        "TF_CONFIG": alone.tf_config(Task(role="worker", index=0)),
    }
    with (tmp_path / "server.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.server"], env=settings, stdout=log, stderr=log
        )
    yield port
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not _can_mount(), reason="this user may not mount a file of hosts")
def test_a_channel_finds_a_task_at_its_new_address(server, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.2 {NAME}\n", encoding="utf-8")
    relays = [Relay("127.0.0.2", 0, server)]
    asks = f"{sys.executable} -m tests.cluster.asks grpc://{NAME}:{relays[0].port}"
    log = tmp_path / "log.txt"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*MOUNTED, f"mount --bind '{hosts}' /etc/hosts && exec {asks}"],
            env={**os.environ, **signals.parent_environment(), "GRPC_FAIL_FAST": "use_caller"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert _said(process, log)["devices"] > 0
        relays[0].close()
        relays.append(Relay("127.0.0.3", relays[0].port, server))
        hosts.write_text(f"127.0.0.3 {NAME}\n", encoding="utf-8")
        assert process.stdin is not None
        process.stdin.write("again\n")
        process.stdin.flush()
        assert _said(process, log, CEILING)["devices"] > 0
    finally:
        process.kill()
        process.communicate()
        for each in relays:
            each.close()


def _local_steps(event: object) -> int:
    found = event.metrics.get("workers", {}) if isinstance(event, Progress) else {}
    return int(found.get(str(WORKER), {}).get("local_steps", 0))


@pytest.fixture
def running_of_rejoin(dataset, tmp_path):
    """Return a run whose tasks are pods, which has a checkpoint."""
    if why := why_not():
        pytest.skip(why)
    with pods(tmp_path, dataset, CONFIG, ROLES) as run:
        run.wait_for(lambda e: isinstance(e, Progress) and e.global_step > REJOIN_EVERY + 50)
        yield run


def _end(run) -> int:
    """Stop the run as a launcher does; return the step of its last checkpoint."""
    run.pods[CHIEF].process.send_signal(signal.SIGTERM)
    assert run.pods[CHIEF].process.wait() == 130, run.log(CHIEF)
    uri, step = newest_checkpoint(run.checkpoints)
    counted = storage.verify(uri).fields["metrics"]["workers"]
    run.attempt_steps = sum(each["local_steps"] for each in counted.values())
    return step


@pytest.mark.slow
def test_a_worker_that_comes_back_at_another_address_trains_again(running_of_rejoin):
    before = running_of_rejoin.pods[WORKER].address
    gone = running_of_rejoin.lose(WORKER)
    # All that it had begun before is over.
    _, other = running_of_rejoin.wait_for(lambda e: isinstance(e, Progress), after=gone)
    _, other = running_of_rejoin.wait_for(
        lambda e: isinstance(e, Progress) and e.global_step > other.global_step + 10 * TURN,
        after=gone,
    )
    running_of_rejoin.wait_for(lambda e: _local_steps(e) > _local_steps(other), after=gone)
    assert running_of_rejoin.pods[WORKER].address != before
    step = _end(running_of_rejoin)
    assert len([e for _, e in running_of_rejoin.seen if isinstance(e, AttemptBegin)]) == 1
    # What was applied of a turn that was under way has no worker.
    assert 0 <= step - running_of_rejoin.attempt_steps <= TURN


@pytest.mark.long
def test_after_a_server_has_come_back_at_another_address_an_attempt_begins(running_of_rejoin):
    before = running_of_rejoin.pods[PS].address
    gone = running_of_rejoin.lose(PS)
    _, attempt = running_of_rejoin.wait_for(lambda e: isinstance(e, AttemptBegin), after=gone)
    assert attempt.global_step % REJOIN_EVERY == 0
    running_of_rejoin.wait_for(lambda e: isinstance(e, Progress), after=gone + 1)
    assert running_of_rejoin.pods[PS].address != before
    assert _end(running_of_rejoin) == attempt.global_step + running_of_rejoin.attempt_steps


CUT_OFF_EVERY, STALL = 500, 10
TIME, TIMEOUT = "grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms"
# A call that nothing ends would be waited for until a test's own limit.
CUT_OFF_CEILING = 120


def options(seconds: int) -> str:
    """Return our options for channels, which ask for a sign after so many seconds."""
    ours = {**liveness.CHANNEL_OPTIONS, TIME: 1000 * seconds, TIMEOUT: 1000 * seconds}
    assert ours.keys() == liveness.CHANNEL_OPTIONS.keys()
    return ",".join(f"{name}={value}" for name, value in ours.items())


class Swallowing(Relay):
    """Passes connections on to a port, until all that comes from those that are there is lost."""

    def __init__(self, target: int) -> None:
        self._lost = threading.Event()
        super().__init__("127.0.0.1", 0, target)

    def lose(self) -> None:
        """Pass nothing on that comes from the connections so far; later ones are as ever."""
        self._lost.set()
        self._lost = threading.Event()

    def _passing(self) -> Callable[[], bool]:
        lost = self._lost
        return lambda: not lost.is_set()


@pytest.fixture
def relay(server):
    made = Swallowing(server)
    yield made
    made.close()


@pytest.mark.slow
def test_a_call_over_a_connection_that_is_cut_off_ends_and_the_next_one_is_answered(
    relay, tmp_path
):
    with (tmp_path / "log.txt").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.asks", f"grpc://127.0.0.1:{relay.port}"],
            env={
                **os.environ,
                **signals.parent_environment(),
                "GRPC_FAIL_FAST": "use_caller",
                # Without gRPC's measure of a connection, which is such a question too: it would end
                # the call where one is under way, on which nobody can rely.
                liveness.CHANNELS: f"{options(1)},grpc.http2.bdp_probe=0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert json.loads(process.stdout.readline())["devices"] > 0
        relay.lose()
        process.stdin.write("again\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], CUT_OFF_CEILING)[0], "the call does not end"
        assert json.loads(process.stdout.readline())["devices"] > 0
    finally:
        process.kill()
        process.communicate()


def settings_of_cut_off(strategy: str) -> dict[str, object]:
    training = {
        "strategy": strategy,
        "steps": 10**7,
        "checkpoint_every": CUT_OFF_EVERY,
        "validate_every": 0,
        "stall_timeout": STALL,
    }
    return {"training": training, "cluster": {"parameter_servers": 1, "workers": 2}}


@pytest.fixture
def may_cut():
    if why := why_not():
        pytest.skip(why)


def reached(step):
    return lambda event: isinstance(event, Progress) and event.global_step > step


@pytest.mark.usefixtures("may_cut")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_asynchronous_training_goes_on_without_a_machine_that_is_cut_off(dataset, tmp_path):
    # Short stretches: an idle channel that asks this often would be closed.
    own = {liveness.CHANNELS: options(15)}
    with pods(
        tmp_path, dataset, settings_of_cut_off("async_parameter_server"), ROLES, environment=own
    ) as run:
        run.wait_for(reached(CUT_OFF_EVERY + 50))
        run.cut_off(WORKER)
        _, at = run.seen[-1]
        # Over a boundary, at which all workers rest.
        run.wait_for(reached(at.global_step + 3 * CUT_OFF_EVERY))
        assert len([e for _, e in run.seen if isinstance(e, AttemptBegin)]) == 1


@pytest.mark.usefixtures("may_cut")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_token_that_never_arrives_ends_the_attempt_and_no_more(dataset, tmp_path):
    # Of a worker that all others reach: only what it sends to the server is lost.
    with pods(tmp_path, dataset, settings_of_cut_off("sync_parameter_server"), ROLES) as run:
        run.wait_for(reached(CUT_OFF_EVERY + 50))
        connect = run.cut_off(WORKER, PS)
        while not run.lost:
            # The end of the chief, which is started again.
            assert run.pods[CHIEF].process.wait() == BEGIN_AGAIN, run.log(CHIEF)
        connect()
        _, attempt = run.wait_for(lambda e: isinstance(e, AttemptBegin), after=run.lost[0])
        assert attempt.global_step % CUT_OFF_EVERY == 0
        run.wait_for(reached(attempt.global_step + CUT_OFF_EVERY), after=run.lost[0])
    assert "no progress for" in run.log(CHIEF)


COMPLETION_STEPS = 60
MODULE = """
import os
import signal
from pathlib import Path

from trainer.cluster import completion
from trainer.models.classifiers import softmax

publish = completion.record


def leave(job, checkpoint):
    os._exit(0)


def die_once(job, checkpoint):
    mark = Path(job.workdir, "died")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(job, checkpoint)


def model(spec, end):
    # At the last moment: all steps are done, and the last checkpoint is published.
    completion.record = globals()[end]
    return softmax(spec)
"""
OTHERS = ("async_parameter_server", "sync_parameter_server", "in_graph")


def strategies(*often: object) -> list[object]:
    return [*often, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


SINGLE = pytest.param("single", marks=pytest.mark.long)
MIRRORED = pytest.param("multi_worker_mirrored", marks=pytest.mark.slow)
LONG_MIRRORED = pytest.param("multi_worker_mirrored", marks=pytest.mark.long)


@pytest.fixture
def train(dataset, tmp_path, monkeypatch):
    """Train a model that meddles with the end; return the run, its exit code and its output."""
    (tmp_path / "ends.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))

    def run(strategy, end):
        training = {"strategy": strategy, "steps": COMPLETION_STEPS, "validate_every": 0}
        config = {
            "model": {"name": "ends:model", "args": {"end": end}},
            "training": training,
            "cluster": {"workers": 2},
        }
        with launched(config, dataset, tmp_path / "run") as run:
            return (run, *run.end())

    return run


@pytest.mark.parametrize("strategy", strategies("single", LONG_MIRRORED))
@pytest.mark.slow
def test_a_leader_that_ends_with_0_before_its_record_has_failed(train, strategy):
    run, code, said = train(strategy, "leave")
    assert code == 1
    assert "ended with exit code 0 before training was over: " in said
    assert said.count("\n") == 1
    assert run.newest() >= COMPLETION_STEPS


@pytest.mark.parametrize("strategy", strategies(SINGLE, MIRRORED))
def test_a_kill_between_the_last_checkpoint_and_the_record_costs_no_step(train, strategy, tmp_path):
    run, code, said = train(strategy, "die_once")
    assert code == 0, said
    assert run.newest() == COMPLETION_STEPS
    path = tmp_path / "run" / "checkpoints" / completion.FILE
    assert json.loads(path.read_text(encoding="utf-8"))["global_step"] == COMPLETION_STEPS
    first, *others = run.events(Restart)
    assert first.cause == f"signal {signal.SIGKILL.name}"
    # The other workers of a mirrored strategy begin again with it.
    assert {each.restarts for each in others} <= {1}


ATTEMPTS = 5
SERVERS = ("ps-0", "worker-0", "worker-1")
CHIEF_ATTEMPTS_SETTINGS = {
    "training": {"steps": 10**7, "checkpoint_every": 200, "validate_every": 0},
    # Servers keep no values, as these would allow them to grow more.
    "cluster": {"workers": 2, "max_restarts": ATTEMPTS, "recovery": "full"},
}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_after_five_attempts_the_servers_have_not_grown(dataset, tmp_path):
    with launched(CHIEF_ATTEMPTS_SETTINGS, dataset, tmp_path) as run:
        sizes = []
        for attempt in range(1, ATTEMPTS + 1):
            begun = run.wait_for(lambda event: isinstance(event, AttemptBegin))
            run.wait_for_step(begun.global_step + 400)
            sizes.append({name: run.task(name).memory_info().rss for name in SERVERS})
            if attempt < ATTEMPTS:
                run.kill("chief-0")
        run.process.send_signal(signal.SIGINT)
        code, said = run.end()
    assert code == 130, said
    restarts = run.events(Restart)
    assert [e.restarts for e in restarts if e.task == "chief-0"] == [1, 2, 3, 4]
    for event in restarts:
        grown = event.cause.startswith("its memory grown from")
        assert grown == (event.task in SERVERS), event
    for name in SERVERS:
        megabytes = [round(size[name] / 2**20) for size in sizes]
        assert megabytes[-1] <= (1 + MAX_GROWTH) * megabytes[0], (name, megabytes)


# More than any machine trains before the interrupt, and few enough for a history of each leg.
HANDOVER_ENDLESS, MORE = 2 * 10**5, 40


@pytest.fixture
def run(kube, tmp_path, monkeypatch):
    """Return what starts or resumes the run on an engine, and cancels it unless it may end."""
    monkeypatch.delenv("FLOTILLA_EVENTS")
    kube.install_jobset()
    workdir = tmp_path / "runs"
    resume = []

    def run_on(launcher, steps=HANDOVER_ENDLESS):
        options = setting(
            cluster__launcher=launcher,
            training__steps=steps,
            training__checkpoint_every=HANDOVER_ENDLESS,
        )
        if steps != HANDOVER_ENDLESS:
            return call("run", workdir, *resume, *options, cwd=tmp_path)
        with calling("run", workdir, *resume, *options, cwd=tmp_path) as process:
            next(line for line in process.stderr if line.startswith("global step"))
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate()
        ended = Called(code=process.returncode, out=out, err=err, workdir=workdir)
        assert ended.code == INTERRUPTED, err
        resume[:] = ["--resume", ended.answer["run_id"]]
        return ended

    return run_on


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_that_changes_its_engine_twice_ends_at_its_exact_step(kube, run):
    reached = []
    for launcher in ("tfjob", "jobset"):
        ended = run(launcher)
        kube.wait_until_deleted()
        reached.append(ended.events(CheckpointPublished)[-1].global_step)
        assert ended.answer["message"].startswith(f"interrupted at global step {reached[-1]}; ")
    ended = run("local", reached[-1] + MORE)
    assert (ended.code, ended.answer["global_step"]) == (0, reached[-1] + MORE), ended.err
    assert [begin.global_step for begin in ended.events(AttemptBegin)] == [0, *reached]
    assert 0 < reached[0] < reached[1]
    for artifact in PUBLISHED:
        storage.verify(ended.answer["artifacts"][artifact])
    checkpoints = storage.join(storage.uri_of(ended.workdir), ended.folder.name, "checkpoints")
    steps = [row["global_step"] for row in read_history(checkpoints)]
    assert steps == sorted(set(steps))
    assert steps[-1] == reached[-1] + MORE
    # Each engine has added its own.
    for begin, end in itertools.pairwise([0, *reached, reached[-1] + MORE]):
        assert [step for step in steps if begin < step <= end]
