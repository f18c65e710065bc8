"""No removal takes a bundle that a run, a schedule, a version or a new submission needs."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from components import in_use
from pipelines.retention import removal
from pipelines.retention.inventory import read
from pipelines.retention.plan import planned, policy
from tests.pipelines.retention.roots import age, manifest, run_of, version_of
from trainer import storage
from trainer.code import references

DIGESTS = [letter * 64 for letter in "abc"]
codes = st.sampled_from(DIGESTS)
days = st.sampled_from([1, 90])
happened = st.one_of(
    st.tuples(st.sampled_from(["run", "version", "note"]), codes, days),
    st.tuples(st.sampled_from(["schedule", "unschedule", "submit"]), codes, st.just(0)),
)


def swept(root: Path) -> list[str]:
    uri, wanted, gone = storage.uri_of(root), policy("30d", 1), []
    plan = planned(read(uri, Path()), wanted, datetime.now(UTC))
    removal.remove(uri, Path(), plan, wanted, lambda item: gone.append(item.path))
    return gone


def take_place(root: Path, history) -> set[str]:
    """Let it all take place below a root; return the bundles that are needed at its end."""
    data = manifest(root / "datasets" / "d", "dataset", 1)
    at = {each: manifest(root / "code" / each, "code", 90) for each in DIGESTS}
    used, scheduled, champion = set(), set(), None
    for number, (what, code, old) in enumerate(history, 1):
        name = f"digits-{number:04d}"
        if what in ("run", "version"):
            made = run_of(root, number, old, data)
            references.of_run(storage.uri_of(root), name, at[code])
            age(root / name, old)
            used |= {code} if old == 1 else set()
            if what == "version":
                count = len(list((root / "registry" / "models" / "digits" / "versions").glob("*")))
                version_of(root, count + 1, old, made, code=at[code])
                champion = [*(champion or [])[-1:], code]
        elif what == "note":
            # Its first step was killed before it had another record.
            references.of_run(storage.uri_of(root), name, at[code])
            used.add(code)
        elif what == "schedule":
            references.of_schedule(at[code], "nightly")
            scheduled.add(code)
        elif what == "unschedule":
            references.forget_schedule(at[code], "nightly")
            scheduled.discard(code)
        else:
            assert in_use.use(at[code])
            used.add(code)
    return used | scheduled | set(champion or ())


@settings(max_examples=25, deadline=None)
@given(st.lists(happened, max_size=6))
def test_what_is_referred_to_is_never_removed_and_all_else_is(history):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        needed = take_place(root, history)
        swept(root)
        left = set(storage.names(storage.join(storage.uri_of(root), "code")))
        assert left == needed
        assert references.referred(storage.uri_of(root)) <= left


def test_a_damaged_note_of_a_schedule_keeps_all_code(tmp_path):
    manifest(tmp_path / "code" / DIGESTS[0], "code", 90)
    note = tmp_path / "code-of-schedules" / "nightly.json"
    note.parent.mkdir()
    note.write_text("{")
    plan = planned(read(storage.uri_of(tmp_path), Path()), policy("30d", None), datetime.now(UTC))
    assert not plan.going
    assert "nightly.json is damaged; as long as it is there, all code stays" in plan.remarks[0]
    note.write_text(json.dumps({"bundles": []}))
    assert swept(tmp_path) == [f"code/{DIGESTS[0]}"]


def test_what_was_used_long_ago_goes_whatever_the_fraction_of_its_second(tmp_path, monkeypatch):
    uri = manifest(tmp_path / "code" / DIGESTS[0], "code", 90)
    monkeypatch.setattr(in_use.time, "time", lambda: 1700000000.4470134)
    assert in_use.use(uri)
    monkeypatch.undo()
    assert swept(tmp_path) == [f"code/{DIGESTS[0]}"]
