"""Tests the log lines of events, which must suffice to follow a training run."""

import pytest

from flotilla.trainer.events import (
    AttemptBegin,
    CheckpointPublished,
    Progress,
    Saved,
    ServersLost,
    UploadFailed,
    Validation,
)
from flotilla.trainer.events.progress import LogLines, TimeLeft, format_event


def progress(step, time, **fields):
    known = {"steps": 300, "loss": 0.25, "steps_per_second": 100.0, "seconds_left": 12.0}
    return Progress(**{"time": time, "global_step": step, **known, **fields})


def test_progress_is_a_line_every_few_seconds():
    lines = LogLines()
    times = {20: 1000.0, 40: 1004.9, 60: 1005.0, 80: 1009.9, 100: 1010.1}
    taken = [lines.take(progress(step, time)) for step, time in times.items()]
    assert [line.partition("  ")[0] for line in taken] == [
        "global step 20/300", "", "global step 60/300", "", "global step 100/300",
    ]  # fmt: skip
    # The first interval includes the tracing of functions, so no time left is estimated from its
    # speed.
    assert taken[0] == "global step 20/300  loss 0.25  100 steps/s"
    assert taken[2] == "global step 60/300  loss 0.25  100 steps/s  12 s left"


def test_a_clock_that_is_set_back_silences_no_progress():
    lines = LogLines()
    assert lines.take(progress(20, 7200.0))
    assert lines.take(progress(40, 3600.0))
    assert not lines.take(progress(60, 3601.0))


def test_progress_says_the_epoch_where_it_is_known():
    said = LogLines().take(progress(20, 1.0, epoch=1.25, epochs=18.75))
    assert said.startswith("global step 20/300 (epoch 1.25 of 18.8)  loss")
    last = LogLines().take(progress(300, 1.0, epoch=3.2, epochs=3.0))
    assert "(epoch 3 of 3)" in last, "the last batch reaches into an epoch that is not trained"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (CheckpointPublished(uri="gs://b/c", global_step=7),
         "checkpoint of global step 7: gs://b/c"),
        (UploadFailed(reason="no answer"), "cannot upload a checkpoint yet: no answer"),
        (Validation(global_step=7, metrics={"loss": 0.5, "accuracy": 0.25}),
         "validation of global step 7: loss 0.5  accuracy 0.25"),
    ],
)  # fmt: skip
def test_what_a_log_shows_and_a_progress_bar_does_not(event, line):
    assert LogLines().take(event) == line
    assert format_event(event) == ""


def test_what_both_show_and_what_neither_does():
    resumed = AttemptBegin(global_step=9, steps=20, resumed=True)
    assert (
        LogLines().take(resumed) == format_event(resumed) == "training resumes from global step 9"
    )
    of_snapshots = AttemptBegin(global_step=9, steps=20, resumed=True, checkpoint=5)
    assert format_event(of_snapshots) == (
        "training resumes from global step 9, with the state of the servers; the newest checkpoint "
        "is from step 5"
    )
    assert LogLines().take(Saved(uri="u", global_step=1, seconds=0.1)) == ""


@pytest.mark.parametrize(
    ("servers", "recovery", "back_to", "line"),
    [
        (("ps-1",), "partial", 400,
         "ps-1 lost at global step 510; partial recovery: only its variables go 110 steps back "
         "to 400; the others are kept"),
        (("ps-0", "ps-2"), "partial", 400,
         "ps-0, ps-2 lost at global step 510; partial recovery: only their variables go 110 "
         "steps back to 400; the others are kept"),
        (("ps-0",), "full", 400,
         "ps-0 lost at global step 510; full recovery: all variables go 110 steps back to 400 "
         "(why)"),
        (("ps-0",), "full", -1,
         "ps-0 lost at global step 510; full recovery: all variables go to the newest "
         "checkpoint (why)"),
    ],
)  # fmt: skip
def test_it_is_said_what_goes_back_as_servers_are_lost(servers, recovery, back_to, line):
    event = ServersLost(
        servers=servers, recovery=recovery, global_step=510, back_to=back_to, reason="why"
    )
    assert LogLines().take(event) == format_event(event) == line


class TestTimeLeft:
    def test_it_is_smoothed_and_counts_down(self):
        left = TimeLeft()
        assert left.seconds(0.0) is None
        left.take(progress(50, 5.0, steps_per_second=1.0, steps=1100))
        # The first interval includes the tracing of functions.
        assert left.seconds(5.0) is None
        left.take(progress(100, 10.0, steps_per_second=100.0, steps=1100))
        assert left.seconds(10.0) == 10
        # A single slow interval does not double the estimate.
        left.take(progress(200, 11.0, steps_per_second=50.0, steps=1100))
        assert left.seconds(11.0) == 10
        assert left.seconds(15.0) == 6
        assert left.seconds(1e6) == 0

    @pytest.mark.parametrize("speed", [0.0, float("nan"), -1.0])
    def test_without_a_speed_it_is_not_known(self, speed):
        left = TimeLeft()
        left.take(progress(1, 1.0, steps_per_second=speed))
        assert left.seconds(1.0) is None
