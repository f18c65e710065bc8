"""Ctrl-C, and going on: `flotilla run` ended in the middle, then its training resumed."""

import signal

import psutil
import pytest

from components.records import gather_report
from pipelines.runs import local_status
from tests.pipelines.called import Called, call, calling, processes_of, setting
from tests.trainer.page import Page
from trainer import storage
from trainer.events import AttemptBegin, CheckpointPublished, StepEnd

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

# More than any machine does before the interrupt comes.
ENDLESS = 10_000_000
LONG = setting(training__steps=ENDLESS, training__checkpoint_every=ENDLESS)
MORE = 40


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("interrupted") / "my runs"


def until_it_trains(process):
    answer = []
    for line in process.stderr:
        answer.append(line)
        if line.startswith("global step"):
            break
    return answer


@pytest.fixture(scope="module")
def interrupted(workdir):
    with calling("run", workdir, *LONG, cwd=workdir.parent) as process:
        answer = until_it_trains(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    return Called(code=process.returncode, out=out, err="".join(answer) + err, workdir=workdir)


@pytest.fixture(scope="module")
def before(interrupted):
    """The events of the first start, as they were before the run was resumed."""
    return [*interrupted.events(CheckpointPublished), *interrupted.events(StepEnd)]


@pytest.fixture(scope="module")
def reached(before):
    """The global step at which the run was ended."""
    return max(event.global_step for event in before if isinstance(event, CheckpointPublished))


@pytest.fixture(scope="module")
def resumed(interrupted, workdir, reached):
    run_id, dataset = interrupted.answer["run_id"], interrupted.answer["artifacts"]["dataset"]
    steps = setting(training__steps=reached + MORE)
    given = ["--resume", run_id, "--dataset", dataset, *steps]
    return call("train", workdir, *given, cwd=workdir.parent)


def test_it_says_so(interrupted, reached):
    assert interrupted.code == 130, interrupted.err
    assert interrupted.answer["status"] == "interrupted"
    assert interrupted.answer["message"].startswith(f"interrupted at global step {reached}; ")


def test_it_ends_with_what_to_do_next(interrupted):
    run_id = interrupted.answer["run_id"]
    words, remedy, verdict = interrupted.err.splitlines()[-3:]
    assert words == f"flotilla: {interrupted.answer['message']}"
    assert remedy == (
        f"flotilla: resume with: flotilla run --workdir '{interrupted.workdir}' --resume {run_id}"
    )
    assert verdict.startswith("interrupted  ")
    assert verdict.endswith("/report.html")
    assert "Traceback" not in interrupted.err + interrupted.out


def test_the_steps_after_it_were_left_out(interrupted, before):
    statuses = {each.step: each.status for each in before if isinstance(each, StepEnd)}
    assert statuses == {
        "resolve_config": "done",
        "prepare_data": "done",
        "validate_data": "done",
        "train_model": "interrupted",
        "finish": "done",
    }
    assert storage.verify(interrupted.answer["artifacts"]["dataset"]).kind == "dataset"


def test_a_last_checkpoint_is_published(interrupted, reached):
    assert reached > 0
    uri = storage.uri_of(interrupted.folder / "checkpoints" / f"step-{reached:08d}")
    assert storage.verify(uri).fields["global_step"] == reached
    assert uri in interrupted.answer["message"]


def test_there_is_a_report_all_the_same(interrupted, reached):
    page = Page((interrupted.folder / "report.html").read_text(encoding="utf-8"))
    assert page.words[1] == "interrupted"
    assert f"interrupted at global step {reached}" in page.text


def test_it_goes_on_from_there(resumed, interrupted, reached):
    assert resumed.code == 0, resumed.err + resumed.log
    assert resumed.answer["status"] == "done"
    assert resumed.answer["run_id"] == interrupted.answer["run_id"]
    assert resumed.answer["global_step"] == reached + MORE
    assert f"training resumes from global step {reached}" in resumed.err.splitlines()
    first, second = resumed.events(AttemptBegin)
    assert (first.resumed, first.global_step) == (False, 0)
    assert (second.resumed, second.global_step) == (True, reached)


def test_it_goes_on_with_the_configuration_of_the_run(resumed):
    # No file was named: only what was set anew is different.
    kept = (resumed.folder / "config.json").read_text(encoding="utf-8")
    assert f'"checkpoint_every": {ENDLESS}' in kept


def test_on_a_given_dataset_it_prepares_none(resumed):
    assert resumed.statuses() == {"resolve_config": "done", "train_model": "done"}
    assert set(resumed.answer["artifacts"]) == {"checkpoint"}


def test_report_and_cost_count_both_starts_and_the_status_is_that_of_the_last(resumed):
    run_id, root = resumed.answer["run_id"], storage.uri_of(resumed.workdir)
    facts = gather_report.gathered("", root, run_id, resumed.folder)
    tries = [each for each in facts["tries"] if each["step"] == "train_model"]
    assert [each["status"] for each in tries] == ["interrupted", "done"]
    assert tries[0]["began"] + tries[0]["seconds"] <= tries[1]["began"]
    trained = next(each for each in facts["steps"] if each["step"] == "train_model")
    assert (trained["status"], trained["tries"]) == ("done", 2)
    assert trained["earlier_seconds"] == tries[0]["seconds"]
    spent = sum(each["seconds"] for each in facts["tries"])
    assert facts["cost"]["seconds_of_all_steps"] == pytest.approx(spent, abs=0.1)
    found = local_status.status_of(resumed.workdir, run_id)
    assert (found.status, found.exit_code) == ("done", 0)


def test_no_process_outlives_a_run_that_is_killed(interrupted, workdir):
    given = ["--dataset", interrupted.answer["artifacts"]["dataset"], *LONG]
    with calling("train", workdir, *given, cwd=workdir.parent) as process:
        until_it_trains(process)
        others = [each for each in processes_of(workdir) if each.pid != process.pid]
        # The runner, a step, and the four tasks of the cluster at least.
        assert len(others) >= 6
        process.kill()
        _, alive = psutil.wait_procs(others, timeout=120)
    assert not alive
    assert not processes_of(workdir)
