"""The process of a replay: the debugger stops in the code of the user."""

import io
import json

import pytest

from pipelines.replay import child
from trainer import mirror, user_code
from trainer.errors import FAILED, INTERRUPTED, RunInterruptedError, UserError

CODE = """
import json


def outer(text):
    width = 3
    return json.loads(text)
"""


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """Return the error of a step that has called code of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debugged_code.py").write_text(CODE, encoding="utf-8")
    outer = user_code.function_for("model.name", "debugged_code:outer")
    with pytest.raises(ValueError, match="Expecting") as caught:
        outer("{")
    return caught.value


def test_it_stops_at_the_line_of_the_user_that_failed(failed, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(child.sys, "stdin", io.StringIO("p width + 4\nw\nq\n"))
    monkeypatch.setattr(child.sys, "stderr", said)
    tracing = child.sys.gettrace()
    child.post_mortem(failed)
    child.sys.settrace(tracing)
    assert "(Pdb) 7" in said.getvalue()
    assert "return json.loads(text)" in said.getvalue()
    assert "decoder.py" not in said.getvalue()


def test_an_error_without_a_trace_opens_nothing(monkeypatch):
    monkeypatch.setattr(child.sys, "stdin", None)
    child.post_mortem(ValueError("never raised"))


@pytest.mark.parametrize(
    ("error", "code", "opened"),
    [(UserError("no width"), FAILED, True), (RunInterruptedError("asked"), INTERRUPTED, False)],
)
def test_it_opens_for_a_failure_and_not_for_a_request_to_end(
    tmp_path, monkeypatch, error, code, opened
):
    def run(*_given):
        try:
            raise error
        except UserError:
            raise SystemExit(code) from None

    said = io.StringIO()
    tree = {"step": "check_gate", "arguments": {}, "artifacts": {}, "debug": True}
    (tmp_path / mirror.FILE).write_text(json.dumps(tree), encoding="utf-8")
    monkeypatch.setattr(child, "_run", run)
    monkeypatch.setattr(child.sys, "argv", ["child", str(tmp_path)])
    monkeypatch.setattr(child.sys, "stdin", io.StringIO("q\n"))
    monkeypatch.setattr(child.sys, "stderr", said)
    tracing = child.sys.gettrace()
    with pytest.raises(SystemExit) as ended:
        child.main()
    child.sys.settrace(tracing)
    assert ended.value.code == code
    assert ("(Pdb)" in said.getvalue()) is opened
