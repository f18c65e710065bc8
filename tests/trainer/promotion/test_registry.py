"""Tests the registry: versions, promotions, the champion, and damage."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import yaml

from flotilla.trainer import storage
from flotilla.trainer.promotion import registry
from flotilla.trainer.promotion.registry import opponent
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.manifest import MANIFEST
from tests.stores.fixtures import bucket_name

NAME = "digits"


LINEAGE = {"run_id": "digits-1", "metrics": {"accuracy": 0.9}}


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def exported(folder, text="weights", **fields):
    source = folder / f"source-{text}"
    served = source / "serving" / NAME / "7"
    served.mkdir(parents=True)
    (served / "saved_model.pb").write_text(text)
    (source / "kserve.yaml").write_text("before")
    uri = storage.uri_of(folder / f"model-{text}")
    fields = {"saved_model": f"serving/{NAME}/7", "num_classes": 10, "inputs": [], **fields}
    storage.publish(source, uri, kind="model", fields=fields)
    return uri


def register(root, folder, text="weights", **fields):
    folder.mkdir(exist_ok=True)
    model = exported(folder, text, **fields)
    return registry.register(root, NAME, model, lineage=LINEAGE, scratch=folder)


def promote(root, number, after, by="me"):
    return registry.promote(root, NAME, number, after=after, by=by)


def promote_all(root, folder, texts):
    """Register a model for each text, and promote it; return the last promotion."""
    for number, text in enumerate(texts, 1):
        assert register(root, folder, text).number == number
        made = promote(root, number, after=number - 1)
    return made


def champion(root):
    found = registry.champion(root, NAME)
    return found.number


def test_an_empty_registry(root):
    assert registry.names(root) == []
    assert registry.versions(root, NAME) == []
    assert registry.champion(root, NAME) is None
    assert registry.newest(root, NAME) == 0
    with pytest.raises(UserError, match="digits has no champion below"):
        registry.rollback(root, NAME, by="me")


def test_a_registry_below_a_uri_with_options(s3, tmp_path):
    bucket = bucket_name()
    s3.create_bucket(bucket)
    root = f"minio://{bucket}/team?endpoint={s3.url}&region=us-east-1"
    promote_all(root, tmp_path, "ab")
    assert [each.number for each in registry.versions(root, NAME)] == [1, 2]
    assert (registry.names(root), champion(root)) == ([NAME], 2)


def test_a_version_is_a_copy_that_can_be_served(root, tmp_path):
    first, second = (register(root, tmp_path, text) for text in ("a", "b"))
    assert [first.number, second.number] == [1, 2]
    storage.delete(storage.uri_of(tmp_path / "model-b"))
    fields = storage.verify(second.uri).fields
    assert (fields["version"], fields["lineage"]) == (2, LINEAGE)
    assert fields["saved_model"] == "serving/digits/2"
    assert storage.read_file(second.uri, "serving/digits/2/saved_model.pb") == b"b"
    service = yaml.safe_load(storage.read_file(second.uri, "kserve.yaml"))
    place = service["spec"]["predictor"]["model"]["storageUri"]
    assert place == f"{second.uri}/serving/digits"
    assert registry.names(root) == [NAME]


def test_the_same_model_is_registered_once(root, tmp_path):
    model = exported(tmp_path)
    first = registry.register(root, NAME, model, lineage=LINEAGE, scratch=tmp_path)
    again = registry.register(root, NAME, model, lineage=LINEAGE, scratch=tmp_path)
    assert again == first
    assert len(registry.versions(root, NAME)) == 1


def test_a_truncated_model_is_not_registered(root, tmp_path):
    model = exported(tmp_path)
    path = tmp_path / "model-weights" / "serving" / NAME / "7" / "saved_model.pb"
    path.write_text("weig")
    with pytest.raises(storage.Corrupt, match=r"saved_model\.pb has 4 bytes \(expected 7\)"):
        registry.register(root, NAME, model, lineage=LINEAGE, scratch=tmp_path)
    assert registry.versions(root, NAME) == []


def test_a_registered_model_is_not_champion_before_it_is_promoted(root, tmp_path):
    first, second = (register(root, tmp_path, text) for text in ("a", "b"))
    promote(root, first.number, after=0)
    assert champion(root) == 1
    made = promote(root, second.number, after=1)
    assert champion(root) == 2
    record = json.loads(storage.read_file(made.uri, "promotion.json"))
    assert (record["version"], record["predecessor"]) == (2, 1)


def test_a_version_that_is_not_there_is_named(root, tmp_path):
    register(root, tmp_path)
    with pytest.raises(UserError, match=r"digits has no version 5 below .* \(known: 1\)"):
        promote(root, 5, after=0)


def test_a_damaged_version_is_not_promoted(root, tmp_path):
    made = register(root, tmp_path)
    folder = storage.local_path(made.uri)
    next(folder.rglob("saved_model.pb")).write_text("wrong")
    with pytest.raises(storage.Corrupt):
        promote(root, 1, after=0)
    assert registry.newest(root, NAME) == 0


def test_the_second_one_learns_who_was_first(root, tmp_path):
    register(root, tmp_path, "a")
    register(root, tmp_path, "b")
    promote(root, 2, after=0, by="run x")
    with pytest.raises(registry.PromotionLostError) as error:
        promote(root, 1, after=0, by="run y")
    assert str(error.value) == (
        "digits: run x promoted version 2 in the meantime, so this promotion had no effect"
    )
    assert champion(root) == 2


def race(function, values):
    """Call the function with each value at the same time, and return the results."""
    begin = threading.Barrier(len(values))

    def go(value):
        begin.wait()
        return function(value)

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(go, values))


def together(*acts):
    """Run several actions concurrently; return the result or error of each."""

    def run(act):
        try:
            return act()
        except registry.PromotionLostError as lost:
            return lost

    return race(run, acts)


def check(root, ends):
    """Assert that one action made the registered promotion and all other errors name it."""
    [won] = [end for end in ends if isinstance(end, registry.Promotion)]
    made = registry.promotions(root, NAME)
    # In a store without conditional writes, each caller publishes the decision with its own time.
    assert replace(made[-1], created=won.created) == won
    assert [each.number for each in made] == list(range(1, won.number + 1))
    assert champion(root) == won.version
    for lost in ends:
        if lost is not won:
            assert f"{won.by} promoted version {won.version} in the meantime" in str(lost)


@pytest.mark.parametrize("same", [True, False])
def test_of_many_at_once_one_wins_and_all_know_it(root, tmp_path, same):
    numbers = [register(root, tmp_path, str(n)).number for n in range(4)]
    check(root, together(*(
        partial(promote, root, 1 if same else number, after=0, by=f"run {number}")
        for number in numbers
    )))  # fmt: skip


def test_versions_at_once_have_numbers_of_their_own(root, tmp_path):
    made = race(lambda text: register(root, tmp_path / text, text).number, "abcd")
    assert sorted(made) == [1, 2, 3, 4]
    assert [each.number for each in registry.versions(root, NAME)] == [1, 2, 3, 4]


def test_rolling_back_goes_back_and_not_forth(root, tmp_path):
    promote_all(root, tmp_path, "abc")
    assert registry.rollback(root, NAME, by="me").version == 2
    assert registry.rollback(root, NAME, by="me").version == 1
    assert champion(root) == 1
    with pytest.raises(UserError, match="digits had no champion before version 1"):
        registry.rollback(root, NAME, by="me")
    promote(root, 3, after=5)
    assert registry.rollback(root, NAME, by="me").version == 1
    assert [each.version for each in registry.promotions(root, NAME)] == [1, 2, 3, 2, 1, 3, 1]


def test_two_names_do_not_meet(root, tmp_path):
    register(root, tmp_path)
    model = exported(tmp_path, "other")
    other = registry.register(root, "mnist", model, lineage=LINEAGE, scratch=tmp_path)
    assert (other.number, registry.names(root)) == (1, ["digits", "mnist"])


def test_numbers_above_nine_are_in_order(root, tmp_path):
    register(root, tmp_path)
    for after in range(11):
        promote(root, 1, after=after)
    assert registry.newest(root, NAME) == 11


def trained(folder, step):
    """Publish a directory with a checkpoint's layout; return its URI and its creation time."""
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    uri = storage.uri_of(folder / f"step-{step}")
    made = storage.publish(folder / "empty", uri, kind="checkpoint", fields={"global_step": step})
    return uri, made.created


def crowned(root, folder, number):
    """Register and promote the model of a new checkpoint; return the checkpoint's URI."""
    checkpoint, created = trained(folder, number)
    origin = {"checkpoint": checkpoint, "checkpoint_created": created}
    made = register(root, folder, str(number), made_from=origin)
    promote(root, made.number, after=registry.newest(root, NAME))
    return checkpoint


def opponent_of(root, checkpoint):
    found = opponent(root, NAME, checkpoint)
    return found.number if found else 0


def test_the_opponent_is_the_champion_but_never_the_model_itself(root, tmp_path):
    checkpoint, _ = trained(tmp_path, 9)
    assert opponent_of(root, checkpoint) == 0
    first = crowned(root, tmp_path, 1)
    assert opponent_of(root, first) == 0
    second = crowned(root, tmp_path, 2)
    assert opponent_of(root, checkpoint) == 2
    # A run that is resumed after its promotion is compared with the champion that it replaced.
    assert opponent_of(root, second) == 1
    # A model that has since been replaced is compared with its successor.
    assert opponent_of(root, first) == 2
    registry.rollback(root, NAME, by="me")
    assert opponent_of(root, checkpoint) == 1


def test_a_checkpoint_that_was_made_again_is_another_one(root, tmp_path):
    first = crowned(root, tmp_path, 1)
    storage.delete(first)
    storage.publish(tmp_path / "empty", first, kind="checkpoint", fields={"global_step": 1})
    assert opponent_of(root, first) == 1


def test_an_opponent_whose_version_is_gone_is_named(root, tmp_path):
    crowned(root, tmp_path, 1)
    storage.delete(registry.version(root, NAME, 1).uri)
    checkpoint, _ = trained(tmp_path, 9)
    with pytest.raises(UserError, match="champion no longer exists: digits has no version 1 below"):
        opponent(root, NAME, checkpoint)


def damage(uri):
    folder = storage.local_path(uri)
    (folder / MANIFEST).write_text('{"schema": 1, "ki')


def test_a_damaged_promotion_is_named_and_can_be_made_again(root, tmp_path):
    made = promote_all(root, tmp_path, "ab")
    damage(made.uri)
    with pytest.raises(storage.Corrupt, match=r"promotions/000002: MANIFEST\.json is damaged"):
        promote(root, 1, after=1)
    storage.delete(made.uri)
    # The earlier decision is restored, even if a different version is requested.
    with pytest.raises(registry.PromotionLostError, match="me promoted version 2 in the meantime"):
        promote(root, 1, after=1)
    assert champion(root) == 2


def spoilt(uri, how):
    folder = storage.local_path(uri)
    tree = json.loads((folder / MANIFEST).read_text())
    if how == "empty":
        (folder / MANIFEST).write_text("")
    elif how == "of no file":
        (folder / MANIFEST).unlink()
        (folder / MANIFEST).mkdir()
    elif how == "of another number":
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name("000001"), folder)
    else:
        changed = {
            "of another schema": {"schema": 99},
            "of another kind": {"kind": "model"},
            "of another type": {"version": "2"},
        }[how]
        (folder / MANIFEST).write_text(json.dumps(tree | changed))


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "of no file",
        *(f"of another {what}" for what in ("schema", "kind", "number", "type")),
    ],
)
def test_no_older_champion_where_the_newest_promotion_cannot_be_read(root, tmp_path, how):
    made = promote_all(root, tmp_path, "ab")
    spoilt(made.uri, how)
    for look in (
        lambda: registry.champion(root, NAME),
        lambda: registry.champion_checkpoint(root, NAME),
        lambda: registry.newest(root, NAME),
        lambda: registry.rollback(root, NAME, by="me"),
        lambda: promote(root, 1, after=2),
        lambda: opponent(root, NAME, trained(tmp_path, 9)[0]),
    ):
        with pytest.raises(UserError, match="the newest promotion of digits cannot be read") as it:
            look()
        assert made.uri in str(it.value)
        assert "\n" not in str(it.value)
    # Deleting the record is the fix that the error message suggests.
    storage.delete(made.uri)
    assert champion(root) == 2


@pytest.mark.parametrize("how", ["folder", "manifest"])
def test_a_promotion_that_is_gone_is_written_again(root, tmp_path, how):
    made = promote_all(root, tmp_path, "ab")
    folder = storage.local_path(made.uri)
    shutil.rmtree(folder) if how == "folder" else (folder / MANIFEST).unlink()
    assert champion(root) == 2
    assert storage.verify(made.uri).fields["by"] == "me"


@pytest.mark.parametrize("tree", ["{", '{"version": 1}', '{"version": "2", "predecessor": 0}'])
def test_a_damaged_note_of_a_promotion_that_is_gone_is_named(root, tmp_path, tree):
    storage.delete(promote_all(root, tmp_path, "a").uri)
    home = storage.local_path(registry.home(root, NAME))
    next(home.glob("claims/promotions/000001/*-accepted")).write_text(tree)
    with pytest.raises(UserError, match=r"claims/promotions/000001.*restore it"):
        champion(root)


def test_an_older_promotion_that_cannot_be_read_is_passed_over_but_not_gone_back_to(
    root, tmp_path, caplog
):
    promote_all(root, tmp_path, "abc")
    spoilt(registry.promotions(root, NAME)[1].uri, "empty")
    assert champion(root) == 3
    assert "skipped" in caplog.text
    with pytest.raises(UserError, match="promotion 2 of digits does not exist or cannot be read"):
        registry.rollback(root, NAME, by="me")
    assert champion(root) == 3


def test_what_has_no_number_of_ours_is_not_read(root, tmp_path):
    promote_all(root, tmp_path, "a")
    home = storage.local_path(registry.home(root, NAME))
    for folder in ("retired", "promoting"):
        (home / folder).mkdir(exist_ok=True)
    for name in ("²3", "٣", "9" * 200, "2", "0000002", "000002.bak", "-00001"):
        for folder in ("versions", "promotions"):
            shutil.copytree(home / folder / "000001", home / folder / name)
        (home / "retired" / f"{name}.json").write_text("{}")
        (home / "promoting" / f"{name}-a.json").write_text('{"at": "now"}')
    assert champion(root) == 1
    assert [each.number for each in registry.versions(root, NAME)] == [1]
    registry.read_retired(registry.home(root, NAME))
    registry.list_requested(root, NAME)


def test_a_version_is_that_of_its_folder(root, tmp_path):
    register(root, tmp_path)
    home = storage.local_path(registry.home(root, NAME))
    # If the copy counted as version 41, the next version would be 42.
    shutil.copytree(home / "versions" / "000001", home / "versions" / "000041")
    assert [each.number for each in registry.versions(root, NAME)] == [1]


def test_the_collection_of_garbage_leaves_what_was_agreed_on(root, tmp_path):
    promote_all(root, tmp_path, "a")
    claims = storage.join(registry.home(root, NAME), "claims", "promotions", "000001")
    before = storage.names(claims)
    assert len(before) == 2
    assert storage.collect_garbage(root) == []
    assert storage.names(claims) == before


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("gs://bucket/run/model", "gs://bucket/run/model/serving/digits"),
        ("s3://bucket/run/model", "s3://bucket/run/model/serving/digits"),
        ("minio://bucket/run/model", "s3://bucket/run/model/serving/digits"),
        (
            "s3://bucket/run/model?endpoint=http://store:9000&disableSSL=true",
            "s3://bucket/run/model/serving/digits",
        ),
        ("minio://bucket/50%25?region=eu", "s3://bucket/50%/serving/digits"),
        ("file:///runs/a%20b/model", "file:///runs/a%20b/model/serving/digits"),
    ],
)
def test_kserve_gets_a_uri_that_it_knows(uri, place):
    service = yaml.safe_load(registry.kserve_service("digits", uri))
    assert service["spec"]["predictor"]["model"]["storageUri"] == place


@pytest.mark.parametrize(
    ("name", "service"), [("digits", "digits"), ("a_b.c-1", "a-b-c-1"), ("7up", "model-7up")]
)
def test_a_name_that_kubernetes_takes(name, service):
    assert registry.service_name(name) == service


@pytest.mark.parametrize("days", [-365, 365])
def test_the_mark_of_another_clock_blocks_no_promotion(root, tmp_path, days, monkeypatch):
    register(root, tmp_path)
    with monkeypatch.context() as patch:
        now = time.time()
        patch.setattr(time, "time", lambda: now + days * 86400)
        registry.retire(registry.home(root, NAME), 1, LINEAGE)
    promote(root, 1, after=0)
    assert champion(root) == 1


@pytest.mark.parametrize("mark", [b"", b'{"at": "now"}', b'{"at": 1e11}', b'{"at": 0}'])
def test_a_mark_without_a_credible_time_is_no_promotion(root, mark):
    home = registry.home(root, NAME)
    storage.write_bytes(storage.join(home, "promoting", "000001-ab.json"), mark)
    assert registry.list_requested(root, NAME) == []
    with registry.promoting(home, 1):
        assert registry.list_requested(root, NAME) == [1]
