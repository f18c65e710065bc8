"""Tests a user's program in pods of the fake cluster, in an image without Flotilla."""

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from flotilla.components.kubernetes.pods.program import WITHOUT_AGENT
from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.cluster.launcher import is_over
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.cluster.job_training import on_engines
from tests.components.kubernetes.attempts import job_of, step
from tests.kubernetes.cluster import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

IMAGE = "own/program:1"
PROGRAM = """
import json, os, pathlib, signal, sys, time
try:
    import flotilla
except ImportError:
    print("no flotilla here:", sys.executable, flush=True)
else:
    sys.exit("flotilla can be imported")
role, index, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
task = json.loads(os.environ["TF_CONFIG"])["task"]
assert task == {"type": role, "index": index}, task
if role == "ps":
    signal.pause()
folder = pathlib.Path(os.environ["FLOTILLA_CHECKPOINTS"])
found = sorted(each.parent.name for each in folder.glob("*/DONE"))
step = int(found[-1].split("-")[1]) if found else 0
print(role, index, "begins at", step, flush=True)
def save():
    new = folder / f"step-{step:06d}"
    new.mkdir(exist_ok=True)
    (new / "state.json").write_text(json.dumps(step))
    (new / "DONE").touch()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
while step < steps and not asked:
    time.sleep(0.02)
    step += 1
    if index == 0:
        print(json.dumps({"step": step, "steps": steps, "loss": 1 / step}), flush=True)
        if step == int(os.environ.get("WAITS_AT", 0)):
            save()
            print("saved", step, flush=True)
            signal.pause()
if index == 0:
    save()
sys.exit(143 if asked else 0)
"""


def make_image(kube, tmp_path):
    """Create an image: a folder with its own Python, which cannot import Flotilla."""
    folder = tmp_path / "image"
    (folder / "bin").mkdir(parents=True)
    base = os.path.realpath(sys._base_executable)
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(base)
    (folder / "app").mkdir()
    (folder / "app" / "train.py").write_text(PROGRAM)
    kube.kubelet.node.images[IMAGE] = folder


class Run:
    """A run of the program, with its launcher and its published checkpoints."""

    def __init__(self, kube, engine, folder):
        self.kube, self.engine, self.folder = kube, engine, folder
        source = folder / "dataset"
        source.mkdir()
        (source / "a.txt").write_text("a")
        self.dataset = storage.uri_of(folder / "published")
        storage.publish(source, self.dataset, kind="dataset", fields={"fingerprint": "f"})
        self.root = storage.uri_of(folder / "run-1")
        self.lines = []
        self.program = {}

    def tree(self, steps, **roles):
        words = ["python3", "app/train.py", "{role}", "{index}", str(steps)]
        return {
            "program": {
                "command": words,
                "roles": roles or {"ps": 1, "worker": 2},
                "data": "uri",
                "checkpoint_marker": "DONE",
                **self.program,
            },
            "training": {"checkpoint_every": 20},
            "cluster": {
                "launcher": self.engine,
                "max_restarts": 9,
                "kubernetes": {"pod": {"image": IMAGE}},
            },
        }

    @contextmanager
    def begun(self, steps, **roles):
        with step(
            self.kube, self.tree(steps, **roles), root=self.root, dataset=self.dataset
        ) as self.step:
            yield self

    def wait_for(self, text):
        for line in self.step.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}: {self.step.end()} {''.join(self.lines)}")

    def end(self):
        code, out, message = self.step.end()
        self.lines += out.splitlines(keepends=True)
        return code, message

    def published(self):
        uri, reached = newest_checkpoint(storage.join(self.root, "checkpoints"))
        storage.verify(uri)
        return reached

    def is_over(self, steps, **roles):
        job = job_of(self.tree(steps, **roles), self.root, self.dataset)
        return is_over(job)


@pytest.fixture
def run(kube, engine, tmp_path):
    make_image(kube, tmp_path)
    return Run(kube, engine, tmp_path)


@on_engines()
def test_an_image_without_flotilla_survives_lost_containers_and_a_cancel(run, kube):
    # In its first attempt, the program waits after it has saved at this step.
    run.program, roles = {"env": {"WAITS_AT": "60"}}, {"ps": 1, "worker": 1}
    with run.begun(4000, **roles):
        assert "image/bin/python3" in run.wait_for("no flotilla here")
        run.wait_for("saved 60")
        # The agent looks for checkpoints once per second, but it must publish this one although the
        # container is killed right after it was saved.
        kube.kill("ps-0")
        kube.kill("worker-0", reason="OOMKilled")
        line = run.wait_for("worker 0 begins at")
        kube.kubelet.kill_sidecar(NAMESPACE, kube.pod("worker-0")["metadata"]["name"])
        run.wait_for('"step": 150')
        run.step.signal(signal.SIGTERM)
        code, message = run.end()
    assert code == INTERRUPTED, message + "".join(run.lines)
    assert "global step" in message
    assert int(line.split()[-1]) == 60
    said = list(events.read(run.folder / "events.jsonl"))
    causes = [each.cause for each in said if isinstance(each, events.Restart)]
    assert "out of memory (OOMKilled, exit code 137)" in causes
    # The restarted agent found the program running, and did not start it again.
    assert sum("worker 0 begins at" in line for line in run.lines) == 2
    kept = run.published()
    assert kept >= 150
    assert not run.is_over(4000, **roles)
    kube.store.wait(lambda: not kube.of_jobs())
    with run.begun(kept + 40, **roles):
        line = run.wait_for("worker 0 begins at")
        code, message = run.end()
    assert int(line.split()[-1]) == kept
    assert (code, run.published()) == (0, kept + 40), message
    assert run.is_over(kept + 40, **roles)
    kube.store.wait(lambda: not kube.of_jobs())


@pytest.mark.parametrize("engine", ["jobset"])
def test_a_program_that_cannot_start_is_one_line(run, kube):
    run.program = {"command": ["/absent/program"]}
    with run.begun(10, worker=1):
        code, message = run.end()
    assert code == 2, message + "".join(run.lines)
    assert "cannot start /absent/program: No such file or directory" in message
    kube.store.wait(lambda: not kube.of_jobs())


@on_engines()
def test_without_python_kubernetes_restarts_the_command(run, kube):
    code = """
import json, os, pathlib, signal, sys
folder, task = pathlib.Path("FOLDER"), json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] == "ps":
    signal.pause()
(folder / f"{task['index']}-{os.getpid()}").touch()
if task["index"] == 0 and len(list(folder.glob("0-*"))) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print("reads", sys.argv[1], flush=True)
"""
    attempts = run.folder / "attempts"
    attempts.mkdir()
    words = ["python3", "-c", code.replace("FOLDER", str(attempts)), "{dataset}"]
    run.program = {"command": words, "python": "", "checkpoint_marker": ""}
    with run.begun(10):
        run.wait_for(f"reads {run.dataset}")
        _, said = run.step.process.communicate(timeout=120)
    assert run.step.process.returncode == 0, said
    assert said.splitlines()[0] == WITHOUT_AGENT
    assert len(list(attempts.glob("0-*"))) == 2
    kube.store.wait(lambda: not kube.of_jobs())
