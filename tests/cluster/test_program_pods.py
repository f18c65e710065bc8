"""A user's program as pods of the stand-in, in an image from which Flotilla cannot be imported."""

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.cluster import completion
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
        if step % 120 == 0:
            save()
if index == 0:
    save()
sys.exit(143 if asked else 0)
"""


def make_image(kube, tmp_path):
    """Make an image: a folder with its own Python, which cannot import Flotilla."""
    folder = tmp_path / "image"
    (folder / "bin").mkdir(parents=True)
    base = os.path.realpath(sys._base_executable)
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(base)
    (folder / "app").mkdir()
    (folder / "app" / "train.py").write_text(PROGRAM)
    kube.kubelet.node.images[IMAGE] = folder


class Run:
    """A run of the program: its launcher, and what it has published."""

    def __init__(self, kube, engine, folder):
        self.kube, self.engine, self.folder = kube, engine, folder
        source = folder / "dataset"
        source.mkdir()
        (source / "a.txt").write_text("a")
        self.dataset = storage.uri_of(folder / "published")
        storage.publish(source, self.dataset, kind="dataset", fields={"fingerprint": "f"})
        self.root = storage.uri_of(folder / "run-1")
        self.lines = []

    def tree(self, steps, **roles):
        words = ["python3", "app/train.py", "{role}", "{index}", str(steps)]
        return {
            "program": {
                "command": words,
                "roles": roles or {"ps": 1, "worker": 2},
                "data": "uri",
                "checkpoint_marker": "DONE",
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
        return completion.is_over(job)


@pytest.fixture
def run(kube, engine, tmp_path):
    make_image(kube, tmp_path)
    return Run(kube, engine, tmp_path)


@on_engines()
def test_a_program_runs_in_an_image_without_flotilla(run, kube):
    with run.begun(100):
        line = run.wait_for("no flotilla here")
        code, message = run.end()
    assert (code, run.published()) == (0, 100), message + "".join(run.lines)
    assert "image/bin/python3" in line
    assert run.is_over(100)
    kube.store.wait(lambda: not kube.of_jobs())


@on_engines()
def test_a_killed_worker_and_a_killed_server_come_again(run, kube):
    with run.begun(600):
        # The agent looks for checkpoints once a second.
        run.wait_for('"event": "checkpoint_published"')
        lost = kube.kill("ps-0")
        kube.pod("ps-0", but=lost["metadata"]["uid"])
        lost = kube.kill("worker-0")
        kube.pod("worker-0", but=lost["metadata"]["uid"])
        line = run.wait_for("worker 0 begins at")
        code, message = run.end()
    assert (code, run.published()) == (0, 600), message + "".join(run.lines)
    assert int(line.split()[-1]) >= 120


@on_engines()
def test_a_cancelled_run_is_resumed_at_the_step_of_its_checkpoint(run, kube):
    with run.begun(4000):
        run.wait_for('"step": 50')
        run.step.signal(signal.SIGTERM)
        code, message = run.end()
    assert code == INTERRUPTED, message + "".join(run.lines)
    assert "global step" in message
    kept = run.published()
    assert kept >= 50
    assert not run.is_over(4000)
    kube.store.wait(lambda: not kube.of_jobs())
    run.lines = []
    with run.begun(kept + 40):
        line = run.wait_for("worker 0 begins at")
        code, message = run.end()
    assert int(line.split()[-1]) == kept
    assert (code, run.published()) == (0, kept + 40), message


@on_engines()
def test_a_killed_agent_comes_again_while_the_program_runs(run, kube):
    with run.begun(600, worker=1):
        run.wait_for('"step": 40')
        kube.kubelet.kill_sidecar(NAMESPACE, kube.pod("worker-0")["metadata"]["name"])
        code, message = run.end()
    assert (code, run.published()) == (0, 600), message + "".join(run.lines)
    assert sum("begins at" in line for line in run.lines) == 1


@on_engines()
def test_a_program_that_cannot_start_is_one_line(run, kube):
    tree = run.tree(10, worker=1)
    tree["program"]["command"] = ["/absent/program"]
    with step(kube, tree, root=run.root, dataset=run.dataset) as run.step:
        code, message = run.end()
    assert code == 2, message + "".join(run.lines)
    assert "cannot start /absent/program: No such file or directory" in message
    kube.store.wait(lambda: not kube.of_jobs())
