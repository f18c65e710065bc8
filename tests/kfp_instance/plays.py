"""Changes of a run for `Store.play`: its steps begin, end or are skipped, and the run ends."""

from tests.kfp_instance.store import Play


def begin(step: str) -> Play:
    def happen(workflow, run):
        run["state"] = "RUNNING"
        workflow.begin(step)

    return happen


def done(step: str, **metrics: object) -> list[Play]:
    return [begin(step), lambda workflow, _run: workflow.end(step, metrics=metrics)]


def skip(workflow, _run):
    workflow.skip()


def over(state: str = "SUCCEEDED") -> Play:
    """End the run, and delete its pods if the workflow says so."""

    def happen(workflow, run):
        run["state"] = state
        if workflow.pods_go:
            workflow.lose_pods()

    return happen
