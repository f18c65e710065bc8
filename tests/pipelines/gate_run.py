"""A run whose data was refused, created without TensorFlow."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from flotilla.components import prepare_data
from flotilla.components.image import MARK_OPTION, own_mark
from flotilla.components.records.step_record import StepRecord, read_records
from flotilla.pipelines.replay import OutputArtifact
from flotilla.trainer import storage
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.form import FIELDS

RUN = "digits-20260301-120000-abcd"
ROWS = "x,c,y\n" + "".join(f"{number},1,{'ab'[number % 2]}\n" for number in range(60))
#: A gate that refuses the constant column `c`.
REFUSING = {"data": {"gate": {"rules": {"constant": "refuse"}}}}


def published(folder: Path, uri: str, kind: str, files: dict[str, Any], **fields: Any) -> str:
    source = folder / f"source-{storage.name_of(uri)}"
    source.mkdir()
    for name, tree in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree), encoding="utf-8")
    storage.publish(source, uri, kind=kind, fields=fields)
    return uri


def prepared(folder: Path, root: str, *, run_id: str = RUN) -> dict[str, StepRecord]:
    """Run the first step as its pod does; return its records by stage, even after a failure."""
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.csv").write_text(ROWS)
    given = {each.name: each.default for each in FIELDS}
    given |= {"source": str(folder / "in" / "*.csv"), "label": "y", "storage_root": root}
    given |= {"settings": REFUSING, "kfp_run_id": run_id}
    at = f"s3://b/v2/flotilla/{run_id}/prepare-data/1"
    made = {
        name: OutputArtifact(f"{at}/{name}", folder / f"artifact-{name}")
        for name in ("configuration", "dataset", "validation", "page")
    }
    compiled = mock.patch.object(sys, "argv", ["executor", MARK_OPTION, own_mark()])
    # Skip the trial of the model: it takes seconds and has its own tests.
    untried = mock.patch.object(fitting, "try_fit", return_value={})
    with compiled, untried, suppress(SystemExit):
        prepare_data.prepare_data.python_func(**given, **made)
    return {each.step: each for each in read_records(storage.join(root, run_id))}
