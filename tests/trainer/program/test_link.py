"""Tests the socket between agent and guard."""

from pathlib import Path

from flotilla.trainer.program import guard
from flotilla.trainer.program.link import GUARD_FILE, MOST_LINES, Link


def test_a_guard_connects_says_what_happens_and_ends(tmp_path):
    folder = tmp_path / ("a" * 100)
    link = Link(folder)
    assert (folder / GUARD_FILE).read_bytes() == Path(guard.__file__).read_bytes()
    child = link.start_guard({"PATH": "/usr/bin:/bin"}, str(tmp_path))
    try:
        assert link.receive(30)["is"] == "ready"
        link.send(do="start", attempt=1, command=["echo", "hello"], cwd="", env={})
        found = [link.receive(30)]
        while found[-1]["is"] != "ended":
            found.append(link.receive(30))
        assert found[-1]["last"] == ["hello"]
        link.wake()
        assert link.receive(30) == {"is": "wake"}
        link.send(do="exit", code=4, message="")
        assert link.receive(30) == {"is": "gone"}
        assert child.wait(30) == 4
    finally:
        link.close()
        child.wait(30)
    assert link.receive(0.01) is None
    assert not (folder / guard.SOCKET).exists()


def test_of_many_lines_the_newest_are_kept_and_the_end_too(tmp_path):
    link = Link(tmp_path)
    lines = [{"is": "line", "text": str(n), "time": 0} for n in range(MOST_LINES + 3)]
    end = {"is": "ended", "attempt": 1, "code": 0, "last": []}
    for each in (*lines, end):
        link.put(each)
    assert [link.receive(0) for _ in range(MOST_LINES + 1)] == [*lines[3:], end]
    assert link.receive(0) is None
    link.close()
