import pytest

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.uri import local_path, parse_pattern, split_pattern


def matched(text, path, root="gs://bucket"):
    found = parse_pattern("data.source", f"{root}/{text}").match(path)
    return found.span if found else None


@pytest.mark.parametrize(
    ("pattern", "path", "span"),
    [
        ("*.csv", "a.csv", ""),
        ("*.csv", "b/a.csv", None),
        ("**/*.csv", "a.csv", ""),
        ("**/*.csv", "b/c/a.csv", ""),
        ("?.csv", "ab.csv", None),
        ("[!b]?.csv", "ab.csv", ""),
        ("[a-c].csv", "b.csv", ""),
        ("{a,b{1,2}}.*", "b2.csv", ""),
        ("{a,b}.csv", "c.csv", None),
        ("*/a+(1).[c]sv", "x/a+(1).csv", ""),
        ("day-{DATE}.csv", "day-2026-02-28.csv", "2026-02-28"),
        ("day-{DATE}.csv", "day-20260228.csv", "2026-02-28"),
        ("day-{DATE}.csv", "day-20260230.csv", None),
        ("{DATE}/*", "2026/02/28/a.csv", "2026-02-28"),
        ("{SPAN}/*", "0012/a.csv", "12"),
        ("{SPAN}/*", "x12/a.csv", None),
        ("*/span={SPAN}.csv", "z/span=7.csv", "7"),
        ("v{SPAN}", "v7/deep/a.csv", "7"),
    ],
)
def test_a_pattern_matches_as_a_shell_does(pattern, path, span):
    assert matched(pattern, path) == span


@pytest.mark.parametrize(
    ("text", "root", "path"),
    [
        ("minio://bucket/k/a-*/x.csv?endpoint=store:9000&region=here",
         "minio://bucket/k?endpoint=store:9000&region=here", "a-1/x.csv"),
        # A question mark is a wildcard unless an option follows.
        ("s3://bucket/k/day-??.csv", "s3://bucket/k", "day-01.csv"),
    ],
)  # fmt: skip
def test_the_root_ends_before_the_first_special_character(text, root, path):
    found = parse_pattern("data.source", text)
    assert found.root == root
    assert found.match(path)


def test_a_file_with_special_characters_is_found_by_its_name(tmp_path):
    path = tmp_path / "a[1]*.csv"
    path.write_text("x")
    assert parse_pattern("data.source", str(path)).root == storage.uri_of(path)


def test_a_path_may_be_relative_or_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("in/*.csv", "~/in/*.csv", f"file://{tmp_path}/in/*.csv"):
        assert parse_pattern("data.source", text).root == storage.uri_of(tmp_path / "in")


def test_the_files_of_a_split_are_below_the_source_or_elsewhere():
    source = "minio://bucket/k?endpoint=store:9000"
    assert (
        split_pattern(source, "train/*", "train").root
        == "minio://bucket/k/train?endpoint=store:9000"
    )
    assert split_pattern(source, "gs://other/x/*", "test").root == "gs://other/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftp://x/y", "neither a path nor a URI"),
        ("gs://B_/y", "not the name of a bucket"),
        ("gs://bucket/{a", "a brace is not closed"),
        ("gs://bucket/{span}", "{span} is unknown"),
        ("gs://bucket/{SPAN}/{SPAN}", "keep only one"),
        ("gs://bucket/{SPAN}/{DATE}", "keep only one"),
        ("gs://bucket/[z-a]", "is not a valid pattern"),
        ("gs://bucket/../x", "'..'"),
        ("~nobody-of-this-name/x", "home folder"),
    ],
)
def test_what_is_no_pattern_is_refused_in_one_line(text, words):
    with pytest.raises(ConfigError, match=r"^data\.source: ") as error:
        parse_pattern("data.source", text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_whose_name_has_signs_of_patterns_is_that_folder(tmp_path):
    folder = tmp_path / "sales [old] {2}"
    folder.mkdir()
    (folder / "a.csv").touch()
    found = parse_pattern("data.source", str(folder / "*.csv"))
    assert local_path(found.root) == folder
    assert found.match("a.csv")
    assert not found.match("a.txt")
