"""Launches a job as a pipeline step does: `python -m tests.cluster.launch JOB`."""

import json
import os
import sys
from pathlib import Path

from flotilla.trainer import events
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import UserError


def main() -> int:
    """Launch the job that a JSON file describes; return its exit code."""
    # Keep the pipe open for writing, so that its reader reaches the end only when this process
    # exits.
    os.open(os.environ[events.VARIABLE], os.O_WRONLY)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        local.launch(
            Job(
                config=parse_config(job["config"]),
                dataset=job["dataset"],
                checkpoints=job["checkpoints"],
                workdir=Path(job["workdir"]),
            )
        )
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
