"""One task of a local cluster as a process, with its folder, environment, resources and log.

The tasks share one machine, so each task is limited to a part of the cores and GPUs. On two cores,
one thread per operation gave 15% more steps per second, and one core per worker another 10%.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from flotilla.trainer import events
from flotilla.trainer.cluster import forks, lease, liveness, termination
from flotilla.trainer.cluster.forks import Request
from flotilla.trainer.cluster.launcher import Job, task_command
from flotilla.trainer.config.cluster import ClusterConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime import signals, threads, user_code
from flotilla.trainer.runtime.errors import RETRYABLE, ConfigError, UserError
from flotilla.trainer.runtime.streams import split_stamp

_GPUS = "/dev/nvidia[0-9]*"


def core_environment(cluster: Cluster) -> dict[str, str]:
    """Return the variables that limit the threads of a task."""
    tasks = sum(map(len, cluster.spec().values()))
    return {
        "TF_NUM_INTRAOP_THREADS": str(max(1, threads.usable() // tasks)),
        # Set at least 2, because TensorFlow's default on one core is 1, which may deadlock.
        "TF_NUM_INTEROP_THREADS": str(max(2, threads.present())),
    }


def pin_to_cores(pid: int, cluster: Cluster, task: Task) -> None:
    """Pin a started worker to its own cores, if there are enough cores for all workers."""
    if own := cores_of_worker(threads.affinity(), cluster.count("worker"), task):
        # Ignore an error, because the process may already have ended.
        with suppress(OSError):
            os.sched_setaffinity(pid, own)


def cores_of_worker(every: list[int], workers: int, task: Task) -> list[int]:
    """Return a worker's equal share of the cores, or an empty list if there are too few."""
    each = len(every) // workers if workers > 1 else 0
    if task.role != "worker" or not each:
        return []
    return every[task.index * each : (task.index + 1) * each]


def gpu_count(config: Config, task: Task) -> int:
    """Return the number of GPUs of a task. Only workers, or a chief without workers, get any."""
    topology = config.topology
    computes = task.role == "worker" or (task.role == "chief" and not topology.workers)
    return config.cluster.gpus_per_worker if computes else 0


def require_gpus(config: Config) -> None:
    """Raise `ConfigError` if local tasks need GPUs and this machine has none."""
    wanted, cluster = config.cluster.gpus_per_worker, config.cluster
    if wanted and not cluster.existing_servers and not glob(_GPUS):
        raise ConfigError(
            f"cluster.gpus_per_worker is {wanted}, but this machine has no NVIDIA GPU ({_GPUS}); "
            "set it to 0 to train on the CPU"
        )


def require_memory(config: Config, parameters: int) -> None:
    """Raise `ConfigError` if this machine cannot hold the model, even with 16-bit parameters."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * parameters > memory:
        raise ConfigError(
            f"model {config.model.name} has {parameters:,} parameters, but this machine has only "
            f"{memory >> 30} GiB of memory; make its layers smaller"
        )


def list_gpu_limits(cluster: ClusterConfig, count: int) -> list[int]:
    """Return the memory limit, in MB, of each of the `count` GPUs that are visible to this process.

    Returns:
        an empty list if memory grows on demand.

    Raises:
        ConfigError: the limit is a fraction, and the driver does not report the memory.
    """
    if not count or not cluster.gpu_memory_fraction:
        return [cluster.gpu_memory_mb] * count if cluster.gpu_memory_mb else []
    # Ask the driver, because TensorFlow reports the memory of a GPU only after allocating it.
    size, device, limits = ctypes.c_size_t(), ctypes.c_int(), []
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuInit(0)
        for index in range(count):
            failed = failed or cuda.cuDeviceGet(ctypes.byref(device), index)
            failed = failed or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            limits.append(max(1, int(cluster.gpu_memory_fraction * size.value) >> 20))
    except (OSError, AttributeError) as error:
        failed = error
    if failed:
        raise ConfigError(
            "cluster.gpu_memory_fraction: the driver does not report the memory of the GPUs "
            f"(libcuda.so.1: {failed}); set cluster.gpu_memory_mb instead"
        )
    return limits


def gpu_environment(config: Config, task: Task) -> dict[str, str]:
    """Return the variables that let a local task see only its own GPUs.

    If workers share a GPU, `cluster.gpu_memory_mb` or `gpu_memory_fraction` splits its memory.
    """
    count = gpu_count(config, task)
    present = len(glob(_GPUS))
    if not count or not present:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    first = task.index * count
    return {"CUDA_VISIBLE_DEVICES": ",".join(str((first + i) % present) for i in range(count))}


# Servers use no Keras. This makes TensorFlow load Keras 2 on first use, not Keras 3 at import.
_SERVER = {"TF_USE_LEGACY_KERAS": "1"}
#: The module of each kind of task, which the fork server loads in addition to TensorFlow.
MODULES = {
    "server": "flotilla.trainer.training.server",
    "chief": "flotilla.trainer.training.chief",
    "worker": "flotilla.trainer.training.chief",
    "evaluator": "flotilla.trainer.training.evaluator",
    "program": "flotilla.trainer.program.agent",
}
CONFIG = "config.json"
LOG = "log.txt"
_GUARD_SECONDS = 30.0
# The file that stores how many times the launcher has started the task.
STARTS = "starts.txt"
# The file in the evaluator's folder that marks the end of training.
OVER = "over.txt"
_TAIL_BYTES = 16384
_REPORTED_LINES = 10
_SIGNALS = {each.value: each.name for each in signal.Signals}


@dataclass(frozen=True, kw_only=True)
class End:
    """How a task ended: its exit code and, if the launcher killed it, the reason.

    Attributes:
        code: the exit code, or the negative number of the signal.
        why: the reason if the launcher killed it, or empty.
        stalled: whether it was killed because its heartbeats stopped.
        planned: whether the kill was planned, so that it does not count as an incident.
    """

    code: int
    why: str = ""
    stalled: bool = False
    planned: bool = False

    @property
    def is_final(self) -> bool:
        """Whether a restart cannot help after this exit code, by the rules of TFJob."""
        return 0 < self.code < RETRYABLE

    @property
    def cause(self) -> str:
        """The cause, as text that follows "ended with"."""
        if self.why:
            return self.why
        if self.code < 0:
            return f"signal {_SIGNALS.get(-self.code, -self.code)}"
        return f"exit code {self.code}"


class TaskProcess:
    """A task that can be started and restarted, always in the same folder and on the same port."""

    def __init__(self, job: Job, cluster: Cluster, task: Task) -> None:
        """Store the arguments. The folder of the task is `<workdir>/<role>-<index>`."""
        self.task = task
        self.folder = job.workdir.absolute() / str(task)
        self.log = self.folder / LOG
        self._job = job
        self._cluster = cluster
        leads = job.config.topology.leads(task)
        self._is_program = bool(job.config.program.command)
        self._serves = task.role != "evaluator" and not leads and not self._is_program
        self._started: forks.Process | None = None
        self._killed: End | None = None
        self._starts = 0
        self.started_at = 0.0
        self.heartbeat = -1

    def start(self) -> forks.Process:
        """Start the process. Raises `UserError`. The caller closes its `heartbeat`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            termination.reserve(self.folder)
            (self.folder / CONFIG).write_text(self._job.config.model_dump_json(), encoding="utf-8")
            self._starts += 1
            (self.folder / STARTS).write_text(str(self._starts), encoding="ascii")
            output = self.log.open("ab")
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}") from None
        self._killed = None
        self.started_at = time.monotonic()
        self.heartbeat, beats = os.pipe()
        beats = forks.high(beats)
        own = liveness.heartbeat_environment(beats, self._job.config.training.stall_timeout)
        with output, os.fdopen(beats, "wb"):
            wanted = Request(
                command=self._command(),
                loaded=self._loads(),
                folder=str(self.folder),
                environment={**self._environment(), **own},
                # Only the launcher should receive a Ctrl-C from the terminal.
                own_session=True,
                descriptors=(beats,),
            )
            self._started = forks.start_process(wanted, output.fileno())
        if self._serves:
            pin_to_cores(self._started.pid, self._cluster, self.task)
        return self._started

    def terminate(self) -> None:
        """Send SIGTERM if the task is running."""
        if self._started and self._started.poll() is None:
            self._started.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the process to exit."""
        if self._started:
            self._started.kill()
            self._started.wait()
        if self._is_program:
            end_guard(self.folder)

    def kill_stalled(self, seconds: float) -> None:
        """Kill the task because it sent no heartbeat for `seconds`."""
        why = f"no heartbeat for {seconds:g} s"
        self._kill_because(End(code=-signal.SIGKILL, why=why, stalled=True))

    def kill_grown(self, before: int, now: int) -> None:
        """Kill the task because its memory has grown from `before` to `now` bytes."""
        why = f"memory growth from {before >> 20} to {now >> 20} MB"
        self._kill_because(End(code=-signal.SIGKILL, why=why, planned=True))

    def _kill_because(self, end: End) -> None:
        if self._started and self._started.poll() is None:
            self._killed = end
            self._started.kill()

    def end(self) -> End:
        """Return how the task ended. Call this only after it has ended."""
        code = (self._started.poll() if self._started else 0) or 0
        if self._killed and code == self._killed.code:
            return self._killed
        return End(code=code)

    def resident_bytes(self) -> int:
        """Return the resident memory of the task in bytes, or 0 if it is unknown."""
        try:
            pid = self._started.pid if self._started else 0
            text = Path(f"/proc/{pid}/statm").read_text("ascii")
        except OSError:
            return 0
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def termination_message(self) -> str:
        """Return the line that the task wrote when it ended, or "" if it was killed."""
        return termination.read(self.folder)

    def last_line(self) -> str:
        """Return the last line of the log."""
        return (self.last_lines(1) or ["(nothing)"])[0]

    def last_lines(self, count: int) -> list[str]:
        """Return at most the last `count` lines of the log, without timestamps."""
        with self.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
        return [split_stamp(line)[1] for line in text.strip().splitlines()[-count:]]

    def _command(self) -> list[str]:
        return task_command(self._job, self.folder / CONFIG, self.folder)

    def _loads(self) -> str:
        """Return the module whose import takes longest, or "" to start without a fork."""
        if self._is_program:
            return MODULES["program"]
        if self._job.config.cluster.in_process:
            # A debugger attaches to processes that start under it, but not to forked ones.
            return ""
        return MODULES["server" if self._serves else self.task.role]

    def _environment(self) -> dict[str, str]:
        return {
            # Hide TensorFlow's messages about devices, because they distract from the task's own.
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **core_environment(self._cluster),
            # Let gRPC read each message as a whole, which is not slower on a single machine.
            "GRPC_EXPERIMENTS": "tcp_frame_size_tuning",
            **threads.environment(),
            **(_SERVER if self._serves else {}),
            **gpu_environment(self._job.config, self.task),
            **signals.parent_environment(),
            **lease.lease_environment(),
            "TF_CONFIG": self._cluster.tf_config(self.task),
            # Let a call to a dead peer fail immediately, without gRPC's retries.
            "GRPC_FAIL_FAST": "use_caller",
            **user_code.environment(),
        }


def end_guard(folder: Path) -> None:
    """Wait until a program's guard exits, and kill the processes that the program left."""
    guard = folder / "exchange" / "guard.py"
    if guard.exists():
        words = [str(guard), "--socket", str(guard.with_name("guard.sock")), "--sweep"]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([sys.executable, "-IS", *words], timeout=_GUARD_SECONDS, check=False)


def report_failure(process: TaskProcess, end: End) -> None:
    """Report that a task has failed permanently: its name, how it ended, and its last log lines."""
    events.emit(
        events.TaskFailed(
            task=str(process.task),
            cause=end.cause,
            log=str(process.log),
            last_lines=tuple(process.last_lines(_REPORTED_LINES)),
        )
    )
