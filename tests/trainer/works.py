"""A helper that collects the progress of all work in a test, however short."""

from contextlib import contextmanager
from unittest import mock

from flotilla.trainer.events import WorkProgress, listen
from flotilla.trainer.events.progress import Work


@contextmanager
def works():
    """Yield the last event of each `Work`, by description, and a list of all `Work` objects."""
    last, made = {}, []
    enter = Work.__enter__

    def begun(work):
        # Mark the work as already reported. Otherwise, the end of short work would not be reported.
        work._reported = work._began
        made.append(work)
        return enter(work)

    def take(event):
        if isinstance(event, WorkProgress) and event.is_over:
            last[event.what] = event

    with mock.patch.object(Work, "__enter__", begun), listen(take):
        yield last, made
