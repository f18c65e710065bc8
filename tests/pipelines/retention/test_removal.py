"""Tests `flotilla gc --keep-runs --keep-versions` on roots laid out as runs leave them."""

import fcntl
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flotilla.components import in_use
from flotilla.components.records import step_record
from flotilla.components.records.record import record_stage
from flotilla.pipelines.cli import app
from flotilla.pipelines.retention import find_run, make_plan, policy, removal
from flotilla.pipelines.retention.inventory import read
from flotilla.pipelines.retention.removal import collect
from flotilla.trainer import storage
from flotilla.trainer.cluster.lease import (
    ABANDONED_SECONDS,
    LEASE_SECONDS,
    Lease,
    holders,
    lease_uri,
    time,
)
from flotilla.trainer.promotion import registry
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.runtime.errors import UserError
from tests.pipelines.retention.roots import (
    age,
    manifest,
    missing,
    nights,
    run_of,
    version_of,
    whole,
)
from tests.stores.fixtures import bucket_name


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def gc(capsys, root, *words):
    code = app.call(["gc", "--workdir", str(root), *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), out, err


def swept(root, keep_runs="30d", keep_versions=1, workdir=Path()):
    uri, wanted = storage.uri_of(root), policy(keep_runs, keep_versions)
    plan, gone = make_plan(read(uri, workdir), wanted, datetime.now(UTC)), []
    removal.remove(uri, workdir, plan, wanted, lambda item: gone.append(item.path))
    return gone


@pytest.mark.long
def test_500_runs_and_50_versions(root, capsys):
    nights(root, 500, 50)
    uri, words = storage.uri_of(root), ("--keep-runs", "30d", "--keep-versions", "10")
    before = sorted(path for path in root.rglob("*") if path.is_file())
    code, found, out, _ = gc(capsys, root, *words, "--dry-run")
    assert (code, found["removed"]) == (0, [])
    assert before == sorted(path for path in root.rglob("*") if path.is_file())
    kinds = [each["kind"] for each in found["planned"]]
    # Of the first 470 nights, only those that produced one of the newest ten versions are kept.
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "version": 40, "run": 470 - 7, "checkpoint": 7, "dataset": 41
    }  # fmt: skip
    assert found["bytes"] == sum(each["bytes"] for each in found["planned"]) > 0
    assert "digits-0001" in out
    code, done, _, err = gc(capsys, root, *words)
    assert code == 2
    assert "--yes" in done["message"]
    assert before == sorted(path for path in root.rglob("*") if path.is_file())
    code, done, _, err = gc(capsys, root, *words, "--yes")
    assert code == 0
    assert done["removed"] == [each["uri"] for each in found["planned"]]
    assert not missing(uri)
    assert [each.number for each in registry.versions(uri, "digits")] == list(range(41, 51))
    assert len(registry.promotions(uri, "digits")) == 50
    assert registry.rollback(uri, "digits", by="test").version == 49
    assert len(trained.read_champion_data(uri, "digits").spans) == 49
    assert not swept(root, keep_versions=10)
    assert "leftover files removed" in err


def test_the_reference_of_the_gate_and_its_chain_stay(root):
    nights(root, 12, 6)
    age(root, 60)
    for each in (root / "registry").rglob("MANIFEST.json"):
        tree = json.loads(each.read_text())
        tree["created"] = "2026-01-01T00:00:00.000Z"
        if tree.get("version") in (5, 6) and "lineage" in tree:
            tree["lineage"]["reference"] = 2
        each.write_text(json.dumps(tree))
    swept(root)
    uri = storage.uri_of(root)
    assert [each.number for each in registry.versions(uri, "digits")] == [2, 5, 6]
    found = registry.reference(uri, "digits", registry.champion(uri, "digits"))
    assert found.number == 2
    assert all(whole(each) for each in found.manifest.fields["made_from"].values())


def test_a_warm_start_and_code_stay_with_what_was_made_of_them(root):
    data = manifest(root / "datasets" / "d", "dataset", 90)
    for digest in ("a" * 32, "b" * 32):
        manifest(root / "code" / digest, "code", 90)
    first = run_of(root, 1, 90, data)
    second = run_of(root, 2, 80, data, warmed_from=first["checkpoint"])
    lineage = {"warmed_from": first["checkpoint"], "code": "b" * 32}
    version_of(root, 1, 80, second, **lineage)
    (root / "digits-0001" / "pinned_inputs.json").write_text("{}")
    age(root, 80)
    gone = swept(root)
    assert gone == [
        "digits-0001/checkpoints/step-00000000",
        "digits-0002/checkpoints/step-00000000",
        f"code/{'a' * 32}",
    ]
    assert whole(first["checkpoint"])


def test_a_run_that_goes_on_stays_with_all_that_it_names(root):
    data = manifest(root / "datasets" / "d", "dataset", 90)
    first, _ = run_of(root, 1, 90, data), run_of(root, 2, 90, data)
    text = json.dumps({"training": {"warm_start": first["checkpoint"]}})
    (root / "digits-0002" / "config.json").write_text(text)
    age(root, 90)
    lease = Lease(storage.uri_of(root / "digits-0002" / "checkpoints"), "digits-0002")
    lease.acquire()
    age(root / "digits-0002", 90)
    assert swept(root) == ["digits-0001/checkpoints/step-00000000"]
    lease.release()
    age(root / "digits-0002", 90)
    with (root / "digits-0002" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert swept(root) == []


def test_a_run_that_was_resumed_since_it_was_listed_stays(root):
    run_of(root, 1, 90, manifest(root / "datasets" / "d", "dataset", 90))
    uri, wanted, gone = storage.uri_of(root), policy("30d", None), []
    plan = make_plan(read(uri, Path()), wanted, datetime.now(UTC))
    assert len(plan.going) == 2
    (root / "digits-0001" / "config.json").touch()
    text = json.dumps({"dataset": storage.uri_of(root / "datasets" / "d")})
    (root / "digits-0001" / "arguments.json").write_text(text)
    stays = removal.remove(uri, Path(), plan, wanted, gone.append)
    assert {each.path for each in stays} == {"digits-0001", "datasets/d"}
    assert not gone


def test_a_dataset_that_is_chosen_at_the_last_moment_stays(root):
    uri = manifest(root / "datasets" / "d", "dataset", 90)
    path, above = "datasets/d", storage.uri_of(root)
    seen = next(iter(read(above, Path()).items.values())).last.timestamp()
    assert in_use.use(uri)
    with in_use.removing(above, path, seen) as free:
        assert not free
    assert swept(root) == []
    assert whole(uri)


def test_a_dataset_that_is_chosen_during_its_removal_is_made_again(root, monkeypatch):
    uri, waited = manifest(root / "datasets" / "d", "dataset", 90), []
    with in_use.removing(storage.uri_of(root), "datasets/d", 0.0) as free:
        assert free

        def ended(_seconds):
            waited.append(True)
            storage.delete(uri)
            storage.delete(storage.join(storage.uri_of(root), "in_use", "datasets-d"))

        monkeypatch.setattr(in_use.time, "sleep", ended)
        assert not in_use.use(uri)
    assert waited


@pytest.mark.parametrize("keep_runs", ["", "2d"])
def test_a_version_that_is_promoted_at_the_last_moment_stays_with_its_chain(
    root, monkeypatch, keep_runs
):
    nights(root, 20, 5)
    age(root, 90)
    uri, retire = storage.uri_of(root), registry.retire

    def promoted_first(home, number, lineage):
        if number == 2:
            registry.promote(uri, "digits", 2, after=5, by="a person")
        retire(home, number, lineage)

    monkeypatch.setattr(registry, "retire", promoted_first)
    gone = swept(root, keep_runs=keep_runs, keep_versions=1)
    versions = [path.rpartition("/")[2] for path in gone if path.startswith("registry")]
    assert versions == ["000001", "000003"]
    assert ("digits-0009" in gone) == bool(keep_runs)
    assert registry.champion(uri, "digits").number == 2
    assert sorted(registry.read_retired(registry.home(uri, "digits"))) == [1, 3]
    assert not missing(uri)


def test_what_cannot_be_removed_keeps_what_it_needs_and_holds_nothing_else_up(
    root, monkeypatch, capsys
):
    for number in (1, 2, 3):
        run_of(root, number, 90, manifest(root / "datasets" / f"d{number}", "dataset", 90))
    delete = storage.delete

    def refused(uri):
        if uri.endswith("digits-0001"):
            raise UserError(f"cannot delete {uri}: Permission denied; make it accessible")
        delete(uri)

    monkeypatch.setattr(removal.storage, "delete", refused)
    code, found, _, err = gc(capsys, root, "--keep-runs", "30d", "--yes")
    assert (code, found["status"]) == (1, "failed")
    assert "digits-0001: Permission denied; make it accessible; 4 of 6 items were removed" in err
    assert sorted(path.name for path in root.glob("d*/d*")) == ["d1", "decision"]
    assert [path.name for path in root.glob("digits-*")] == ["digits-0001"]


def test_what_cannot_be_deleted_of_a_dead_removal_is_said(root, monkeypatch, caplog):
    run_of(root, 1, 90, manifest(root / "datasets" / "d", "dataset", 90))
    with monkeypatch.context() as patched:
        # Delete nothing, as if the folder contained a file of another user.
        patched.setattr("flotilla.trainer.storage.local.shutil.rmtree", lambda *_, **__: None)
        assert swept(root) == ["digits-0001", "datasets/d"]
        assert not storage.collect_garbage(storage.uri_of(root))
    assert ".digits-0001." in caplog.text
    assert "make it accessible to this user" in caplog.text
    assert len(storage.collect_garbage(storage.uri_of(root))) == 4
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_a_run_that_went_on_and_ended_since_the_second_look_stays(root, monkeypatch):
    data = manifest(root / "datasets" / "d", "dataset", 90)
    for number in (1, 2):
        run_of(root, number, 90, data)
    locked = removal._lock

    def resumed(above, workdir, item):
        (root / "digits-0002" / "events.jsonl").write_text("{}\n")
        return locked(above, workdir, item)

    monkeypatch.setattr(removal, "_lock", resumed)
    assert swept(root) == ["digits-0001"]
    assert whole(data)


def test_many_that_stay_after_all_are_looked_at_once_each(root, monkeypatch):
    nights(root, 40, 1)
    age(root, 60)
    before = read(storage.uri_of(root), Path())
    looks = []
    monkeypatch.setattr(removal, "_remove", lambda *_: False)
    monkeypatch.setattr(removal, "find_run", lambda path: looks.append(path) or find_run(path))
    assert not swept(root)
    assert len(looks) <= 2 * len(before.items)


def test_one_of_two_removals_that_ends_leaves_the_mark_of_the_other(root, monkeypatch):
    uri, path = manifest(root / "datasets" / "d", "dataset", 90), "datasets/d"
    above, waited = storage.uri_of(root), []
    other = in_use.removing(above, path, 0.0)
    with other as free, in_use.removing(above, path, 0.0) as too:
        assert (free, too) == (True, True)
        storage.delete(uri)
    assert in_use._removals(above, path) == {}
    with in_use.removing(above, path, 0.0):
        with in_use.removing(above, path, 0.0):
            pass

        def ended(_seconds):
            waited.append(True)
            storage.delete(storage.join(above, "in_use", "datasets-d"))

        monkeypatch.setattr(in_use.time, "sleep", ended)
        assert not in_use.use(uri)
    assert waited


def test_a_removal_that_was_killed_is_forgotten(root, monkeypatch):
    uri, path = manifest(root / "datasets" / "d", "dataset", 90), "datasets/d"
    storage.write_bytes(
        in_use._place(storage.uri_of(root), path, "removing-1.json"), b'{"at": 1.0}'
    )
    monkeypatch.setattr(in_use.time, "sleep", None)
    assert in_use.use(uri)
    with in_use.removing(storage.uri_of(root), path, 9e9) as free:
        assert free
    assert in_use._removals(storage.uri_of(root), path) == {}


def test_a_version_that_is_or_was_removed_cannot_be_champion(root):
    nights(root, 6, 6)
    uri = storage.uri_of(root)
    registry.retire(registry.home(uri, "digits"), 1, {})
    with pytest.raises(UserError, match="version 1 is being removed by `flotilla gc`"):
        registry.promote(uri, "digits", 1, after=6, by="a person")
    assert registry.champion(uri, "digits").number == 6
    assert registry.list_requested(uri, "digits") == []
    swept(root, keep_runs="", keep_versions=1)
    assert registry.rollback(uri, "digits", by="a person").version == 5
    with pytest.raises(UserError, match="no longer has version 4, the champion before version 5"):
        registry.rollback(uri, "digits", by="a person")


def test_whenever_the_store_fails_what_is_left_is_whole(root, monkeypatch, capsys):
    nights(root, 20, 5)
    age(root, 90)
    uri, delete, calls = storage.uri_of(root), storage.delete, []

    def failing(at):
        calls.append(at)
        if len(calls) % 7 == 0:
            raise storage.Unavailable(f"cannot delete {at}: the store does not answer")
        delete(at)

    monkeypatch.setattr(removal.storage, "delete", failing)
    words = ("--keep-runs", "2d", "--keep-versions", "1", "--yes")
    for _ in range(20):
        code, found, _, err = gc(capsys, root, *words)
        assert not missing(uri)
        if code == 0:
            break
        assert found["status"] == "failed"
        assert "the store does not answer" in found["message"]
        assert "were removed; try again" in err
    assert code == 0
    monkeypatch.undo()
    assert not swept(root, keep_runs="2d")


def test_two_at_once(root):
    nights(root, 20, 5)
    age(root, 90)
    uri, wanted = storage.uri_of(root), policy("2d", 1)
    plan = make_plan(read(uri, Path()), wanted, datetime.now(UTC))
    ours, other = [], []

    def done(item):
        ours.append(item.path)
        if len(ours) == 3:
            removal.remove(uri, Path(), plan, wanted, lambda each: other.append(each.path))

    removal.remove(uri, Path(), plan, wanted, done)
    assert {*ours} == {each.path for each in plan.going}
    assert not missing(uri)
    assert not (root / "in_use").exists() or not list((root / "in_use").rglob("*.json"))


def test_a_damaged_manifest_keeps_its_run_and_says_so(root, capsys):
    nights(root, 4, 1)
    age(root, 90)
    damaged = root / "digits-0001" / "checkpoints" / "step-00000100" / "MANIFEST.json"
    damaged.write_text("{")
    for name in ("datasets", "digits-0001", "digits-0002"):
        for each in (root / name).rglob("MANIFEST.json"):
            each.write_text(each.read_text().replace('"created": "2026', '"created": "2025'))
    age(root, 90)
    code, found, _, _ = gc(capsys, root, "--keep-runs", "30d", "--dry-run")
    assert code == 0
    assert any("step-00000100" in each and "damaged" in each for each in found["kept"])
    # The run may need any of these items.
    assert found["planned"] == []
    assert any("2 damaged records may need any of them" in each for each in found["kept"])
    storage.delete(storage.uri_of(root / "digits-0001"))
    _, found, _, _ = gc(capsys, root, "--keep-runs", "30d", "--dry-run")
    assert "digits-0002" in {storage.name_of(each["uri"]) for each in found["planned"]}


@pytest.mark.parametrize("what", ["nothing", "other files", "a published directory"])
def test_what_is_no_root_is_refused(root, capsys, what):
    if what == "other files":
        (root / "project" / "checkpoints" / "step-1").mkdir(parents=True)
        (root / "project" / "config.json").write_text("{}")
        (root / "project" / "checkpoints" / "step-1" / "weights").write_text("")
        age(root, 900)
    elif what == "a published directory":
        manifest(root, "dataset", 90)
    code, found, _, _ = gc(capsys, root, "--keep-runs", "30d", "--yes")
    assert code == 2
    assert "not a storage root" in found["message"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket(tmp_path, request, scheme):
    server = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    bucket = bucket_name()
    server.create_bucket(bucket)
    uri = f"{scheme}://{bucket}/root"
    local = tmp_path / "local"
    nights(local, 4, 2)
    for each in local.rglob("*"):
        if each.is_file():
            text = each.read_text().replace(storage.uri_of(local), uri)
            text = text.replace('"created": "2026', '"created": "2025')
            storage.write_bytes(storage.join(uri, *each.relative_to(local).parts), text.encode())
    wanted, gone = policy("30d", 1), []
    plan = make_plan(read(uri, tmp_path), wanted, datetime.now(UTC))
    removal.remove(uri, tmp_path, plan, wanted, lambda item: gone.append(item.path))
    assert [path for path in gone if "/" not in path] == ["digits-0001", "digits-0003"]
    assert not missing(uri)
    assert storage.names(storage.join(uri, "digits-0001")) == []


@pytest.fixture(params=["file", "gs", "s3"])
def empty_root(request, tmp_path):
    """Return the URI of an empty storage root, for each storage client."""
    if request.param == "file":
        return storage.uri_of(tmp_path / "root")
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    bucket = bucket_name()
    server.create_bucket(bucket)
    return f"{request.param}://{bucket}/root"


def locked(empty_root, run, ago=0.0):
    uri = storage.join(empty_root, run, "checkpoints")
    Lease(uri, run, lambda: time.time() - ago).acquire()
    return uri


def test_the_records_of_a_run_on_a_cluster_stay(empty_root, capsys):
    at = storage.join(empty_root, "0b7c")
    with record_stage("train_model", at):
        locked(empty_root, "0b7c", ago=LEASE_SECONDS + ABANDONED_SECONDS)
        step_record.publish_config(at, "{}")
    assert app.call(["gc", "--json", "--set", f"storage.root={empty_root}"]) == 0
    removed = json.loads(capsys.readouterr().out.splitlines()[-1])["removed"]
    assert removed
    assert all("/checkpoints/.lock" in uri for uri in removed)
    assert [each.step for each in step_record.read(at, well=True)] == ["train_model"]
    assert storage.read_bytes(storage.join(at, "config.json")) == b"{}"


def test_expired_locks_are_removed_and_named(empty_root, capsys, tmp_path):
    expired = locked(empty_root, "digits-1", ago=LEASE_SECONDS + ABANDONED_SECONDS)
    held = locked(empty_root, "digits-2")
    storage.write_bytes(storage.join(empty_root, "digits-1", "report.html"), b"kept")
    words = ["gc", "--workdir", str(tmp_path / "runs"), "--json"]
    assert app.call([*words, "--set", f"storage.root={empty_root}"]) == 0
    place = lease_uri(expired, 1)
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["removed"] == [place]
    count = f"1 leftover files removed below {empty_root}"
    assert err.splitlines() == [f"removed {place}", count]
    assert holders(expired) == {}
    assert [each.run for each in holders(held).values()] == ["digits-2"]
    assert "report.html" in storage.names(storage.join(empty_root, "digits-1"))


def test_finished_parts_of_a_forsaken_preparation_are_removed(empty_root, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "train.records").write_bytes(b"record")
    old, going_on = (
        storage.join(empty_root, "preparing", name) for name in ("digits-1", "digits-2")
    )
    for folder, number in ((old, "000000"), (going_on, "000000"), (going_on, "000001")):
        storage.publish(tmp_path / "part", storage.join(folder, number), kind="part")
    for folder in (old, going_on):
        place = storage.join(folder, "000000", "MANIFEST.json")
        tree = json.loads(storage.read_bytes(place))
        tree["created"] = "2020-01-01T00:00:00.000Z"
        storage.write_bytes(place, json.dumps(tree).encode())
    assert collect(empty_root) == (old,)
    assert storage.names(old) == []
    assert storage.names(going_on) == ["000000", "000001"]
