"""The pieces of work of a test, however short."""

from contextlib import contextmanager
from unittest import mock

from flotilla.trainer.events import WorkProgress, listen
from flotilla.trainer.events.progress.work import Work


@contextmanager
def works():
    """Give the last event of each piece of work, by what was done, and the works themselves."""
    last, made = {}, []
    enter = Work.__enter__

    def begun(work):
        # It counts as reported before, so that its end is reported.
        work._reported = work._began
        made.append(work)
        return enter(work)

    def take(event):
        if isinstance(event, WorkProgress) and event.is_over:
            last[event.what] = event

    with mock.patch.object(Work, "__enter__", begun), listen(take):
        yield last, made
