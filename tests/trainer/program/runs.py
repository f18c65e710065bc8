"""Jobs that run a small program, which counts steps."""

import sys
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config

# A program that counts steps and can save a checkpoint in TensorFlow's layout.
COUNTS = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["FLOTILLA_CHECKPOINTS"])
task = json.loads(os.environ["TF_CONFIG"])["task"]
state = folder / "checkpoint"
step = int(state.read_text().split('"')[1].split("-")[1]) if state.exists() else 0
print("begins at", step, flush=True)
def save(step):
    for name in (f"ckpt-{step}.data-00000-of-00001", f"ckpt-{step}.index"):
        (folder / name).write_text(str(step))
    state.write_text(f'model_checkpoint_path: "ckpt-{step}"')
def stop(*_):
    save(step)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""
COUNT = (
    COUNTS
    + """
while step < int(sys.argv[1]):
    step += 1
    print(json.dumps({"step": step, "loss": 1 / step, "steps": int(sys.argv[1])}))
    save(step)
model = pathlib.Path(os.environ["FLOTILLA_MODEL"])
(model / "a.txt").write_text("model")
"""
)


def make_job(folder: Path, text: str, *words: str, roles=None, at="", **sections) -> Job:
    """Return a job that runs a program with this source code.

    `at` is the URI of its checkpoints, by default in a local folder; `sections` are sections of the
    configuration.
    """
    script = folder / "program.py"
    script.write_text(text)
    source = folder / "dataset"
    if not source.exists():
        source.mkdir()
        (source / "a.txt").write_text("a")
        uri = storage.uri_of(folder / "published")
        storage.publish(source, uri, kind="dataset", fields={"fingerprint": "f"})
    own = sections.pop("program", {})
    config = parse_config(
        {
            "program": {
                "command": [sys.executable, str(script), *words],
                "roles": roles or {"chief": 1},
                "data": "uri",
                **own,
            },
            **sections,
        }
    )
    return Job(
        config=config,
        dataset=storage.uri_of(folder / "published"),
        checkpoints=at or storage.uri_of(folder / "run" / "checkpoints"),
        workdir=folder / "cluster",
    )


def published_steps(job: Job) -> list[int]:
    return [step for _, step in list_checkpoints(job.checkpoints)]
