"""Compares each learning task under each strategy with Keras's `fit`, and writes `docs/tasks.md`.

`fit` uses the same model, optimizer, batch size and number of updates, and Keras's own losses. All
runs are evaluated on the test split with the last weights, for three seeds. Each result is
immediately written to `build/tasks.json`, so that an interrupted measurement can be continued.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import read_index
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config

ROOT = Path(__file__).parents[1]
SEEDS = 3
FIT = "fit"
STRATEGIES = {
    "single": {"workers": 1},
    "async_parameter_server": {},
    "sync_parameter_server": {},
    "in_graph": {},
    "multi_worker_mirrored": {},
}
# The metric of each configuration in the table.
METRICS = {
    "diabetes": "mean_absolute_error",
    "linnerud": "waist_mean_absolute_error",
    "wine": "accuracy",
    "digits": "accuracy",
    "breast_cancer": "auc",
    "digit_properties": "macro_f1",
    "clicks": "auc",
    "brackets": "accuracy",
    "bracket_depths": "accuracy",
}
PAGE = "docs/tasks.md"


def configuration(name: str, strategy: str, seed: int) -> Config:
    """Return a configuration from `configs/` for a strategy and a seed."""
    settings = {
        "training.strategy": "single" if strategy == FIT else strategy,
        "training.seed": seed,
        "training.hand_on": "last",
        "gate.min": {},
        "gate.max": {},
        **{f"cluster.{key}": value for key, value in STRATEGIES.get(strategy, {}).items()},
    }
    path = ROOT / "configs" / f"{name}.yaml"
    return load_config(path, [f"{key}={value}" for key, value in settings.items()])


def measured(name: str, way: str, seed: int, home: Path) -> dict[str, float]:
    """Train a configuration with a strategy or with `fit`. Return its metrics on the test split."""
    # Import these only in the child process. The parent starts one child for each measurement.
    from benchmarks.baselines import compiled  # noqa: PLC0415
    from flotilla.trainer.data.prepare import prepare  # noqa: PLC0415
    from flotilla.trainer.data.read import evaluation_batches, stage_shards  # noqa: PLC0415
    from flotilla.trainer.evaluation.evaluate import load_trained_model  # noqa: PLC0415
    from flotilla.trainer.features.dataset_spec import DatasetSpec  # noqa: PLC0415
    from flotilla.trainer.tasks.registry import make_objective, set_positive  # noqa: PLC0415

    config = configuration(name, way, seed)
    dataset = prepare(config.data, storage.uri_of(home / "data"), home / "scratch").uri
    manifest = storage.read_manifest(dataset)
    spec = set_positive(config.task, DatasetSpec.from_manifest(manifest))
    work = Path(tempfile.mkdtemp(dir=home))
    objective = make_objective(config, spec)
    if way == FIT:
        model = compiled.fitted(config, dataset, work)
        objective.accept(model, model.output)
    else:
        last = read_index(launched(config, dataset, work))[-1].uri
        model = load_trained_model(config, spec, objective, last, work).model
    files = [str(path) for path in stage_shards(dataset, work / "test", "test")]
    sums = objective.totals(model, evaluation_batches(spec, files, batch_size=1000))
    return objective.means(np.asarray(sums))


def launched(config: Config, dataset: str, work: Path) -> str:
    """Train on a local cluster, and return the URI of the checkpoints."""
    checkpoints = storage.uri_of(work / "checkpoints")
    local.launch(
        Job(config=config, dataset=dataset, checkpoints=checkpoints, workdir=work / "tasks")
    )
    return checkpoints


def run(kept: Path) -> dict[str, dict[str, list[float]]]:
    """Run the missing measurements, and return the values by configuration and strategy."""
    found: dict[str, dict[str, list[float]]] = (
        json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    )
    with tempfile.TemporaryDirectory(prefix="flotilla-tasks-") as home:
        for seed in range(SEEDS):
            for name, metric in METRICS.items():
                for way in (FIT, *STRATEGIES):
                    values = found.setdefault(name, {}).setdefault(way, [])
                    if len(values) > seed:
                        continue
                    command = [sys.executable, "-m", "benchmarks.tasks", name, way, str(seed), home]
                    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
                    done = subprocess.run(
                        command, stdout=subprocess.PIPE, text=True, check=True, env=quiet
                    )
                    values.append(json.loads(done.stdout.splitlines()[-1])[metric])
                    kept.parent.mkdir(exist_ok=True)
                    kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def table(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Return a table of the values: the mean and the range over the seeds."""
    lines = [
        f"| configuration | task | metric | `{FIT}` | "
        + " | ".join(f"`{name}`" for name in STRATEGIES)
        + " |",
        "|" + "---|" * (4 + len(STRATEGIES)),
    ]
    for name, metric in METRICS.items():
        path = f"../configs/{name}.yaml"
        task = task_of(name)
        ways = found.get(name, {})
        cells = [_cell(ways.get(way, [])) for way in (FIT, *STRATEGIES)]
        lines.append(f"| [`{name}`]({path}) | `{task}` | `{metric}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def task_of(name: str) -> str:
    """Return the task of a configuration. `auto` means `classification` in these configurations."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    said = yaml.safe_load(text).get("task", {}).get("name", "auto")
    return "classification" if said == "auto" else str(said)


def _cell(values: list[float]) -> str:
    if not values:
        return "not measured"
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Measure one task, or measure all tasks and write the page."""
    if arguments := sys.argv[1:]:
        name, way, seed, home = arguments
        sys.stdout.write(f"{json.dumps(measured(name, way, int(seed), Path(home)))}\n")
        return
    put(ROOT / PAGE, "measured", table(run(ROOT / "build" / "tasks.json")))


def put(page: Path, name: str, text: str) -> None:
    """Write a table into a page, between the two comments with its name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
