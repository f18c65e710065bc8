"""Pipelines built from the component files, as a user would build them.

Run it as `python -m tests.pipelines.reused NAME ...`: `one FOLDER ROOT ARGUMENTS` runs only
`prepare-data.yaml`; `all FOLDER ROOT ARGUMENTS` connects all components in one pipeline.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kfp import components, dsl, local

RUN = "reused-run"


def loaded(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.yaml"))
    return {path.stem: components.load_component_from_file(str(path)) for path in files}


def pipeline_of(steps: dict[str, Any], given: dict[str, Any]) -> Any:
    """Return a pipeline of the components with the given form fields."""

    @dsl.pipeline(name="reused")
    def reused() -> None:
        end = steps["finish"](
            root=given["storage_root"], settings=given["settings"], kfp_run_id=RUN
        )
        with dsl.ExitHandler(end):
            made = steps["prepare-data"](**given, kfp_run_id=RUN).outputs
            run = {key: made[key] for key in ("config", "root", "run_id")}
            dataset = made["dataset_uri"]
            trained = steps["train-model"](**run, dataset=dataset, image="", store_secret="")
            checkpoint = trained.outputs["Output"]
            measured = steps["evaluate-model"](**run, dataset=dataset, checkpoint=checkpoint)
            decision = measured.outputs["decision_uri"]
            made = {"dataset": dataset, "checkpoint": checkpoint, "decision": decision}
            steps["export-model"](**run, **made, image="theirs:1")

    return reused


def main() -> None:
    name, folder, root, arguments = sys.argv[1:]
    given = json.loads(arguments)
    local.init(
        runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True
    )
    steps = loaded(Path(folder))
    if name == "one":
        outputs = steps["prepare-data"](**given, kfp_run_id=RUN).outputs
        answer = {key: value for key, value in outputs.items() if isinstance(value, str)}
        Path(root, "outputs.json").write_text(json.dumps(answer), encoding="utf-8")
    else:
        pipeline_of(steps, given)()


if __name__ == "__main__":
    main()
