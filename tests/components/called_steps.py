"""What the tests of steps share: a run to be judged, and the one line of a refusal."""

import json

import pytest

RUN = "digits-1"


def text_of(run, **gate):
    tree = {**run.config.model_dump(mode="json"), "gate": {"min": gate, "max": {}}}
    return json.dumps(tree)


def refused(step, *given, capsys):
    """Call a step that has to end with one line; return its exit code and the line."""
    with pytest.raises(SystemExit) as ended:
        step(*given)
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return ended.value.code, err.removeprefix(f"flotilla: {step.__name__}: ").strip()
