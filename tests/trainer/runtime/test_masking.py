import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer import events
from flotilla.trainer.cluster import termination
from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.schema import StorageConfig
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.masking import (
    find_credentials,
    is_sent_openly,
    mask,
    one_line,
    printable,
)

SECRET = "sW0rdf1sh/Ab+Cd"
WITH_SECRETS = [
    (f"s3://AKIA:{SECRET}@bucket/x", "s3://***"),
    ("s3://AKIA:sW0rdf1sh@bucket/x", "s3://***@bucket/x"),
    ("s3://AKIA%3AsW0rdf1sh%40bucket/x", "s3://***@bucket/x"),
    ("gs://sW0rdf1sh@bucket", "gs://***@bucket"),
    ("minio://AKIA:sW0rdf1sh/x", "minio://***"),
    ("minio://b/k?endpoint=u:sW0rdf1sh@h:9000", "minio://b/k?endpoint=***@h:9000"),
    ("minio://b/k?endpoint=http://u:sW0rdf1sh@h:9000", "minio://b/k?endpoint=***@h:9000"),
    ("http://u:sW0rdf1sh@host:80/x?y=1", "http://***@host:80/x?y=1"),
    ("https://u:sW0r/df1sh@host/x", "https://***@host/x"),
    ("https://h/f?X-Amz-Signature=sW0rdf1sh&x=1", "https://h/f?X-Amz-Signature=***&x=1"),
    ("https://h/f?a=1&amp;sig=sW0rdf1sh", "https://h/f?a=1&amp;sig=***"),
    ("https://h/f?access_token=sW0rdf1sh#there", "https://h/f?access_token=***#there"),
    ("https://h/f?X-Goog-Signature=sW0rdf1sh", "https://h/f?X-Goog-Signature=***"),
    ("https://h/f#access_token=sW0rdf1sh", "https://h/f#access_token=***"),
]
WITHOUT = [
    "s3://bucket/a@b:c/d",
    "file:///home/a@b/c:d@e",
    "http://host:8080/x@y",
    "http://[::1]:80/x",
    "https://h/?max_tokens=3&monkey=4",
    "https://proxy:8080 did not answer @ 10:00",
    "bearer of the news",
    "cookies are in a file",
    "a:b@c",
    "cannot read gs://bucket: no credentials",
    "gs://bucket:",
]


HEADERS = [
    "Authorization: Bearer sW0rdf1sh.abc",
    "{'Cookie': 'session=sW0rdf1sh; theme=dark'}",
    '"authorization": "AWS4-HMAC-SHA256 Credential=x, Signature=sW0rdf1sh"',
    "sent with bearer sW0rdf1sh0123",
    "X-Api-Key: sW0rdf1sh",
    "aws_secret_access_key = sW0rdf1sh",
]


def test_credentials_of_a_uri_are_found_and_masked():
    for text, said in WITH_SECRETS:
        assert find_credentials(text), text
        assert mask(text).startswith(said), text
        for part in ("sW0r", "df1sh", SECRET):
            assert part not in mask(f'{{"uri": "{text}"}}'), text


def test_what_has_no_credentials_stays():
    assert [(find_credentials(text), mask(text)) for text in WITHOUT] == [
        ("", text) for text in WITHOUT
    ]


def test_credentials_of_headers_are_masked():
    for text in HEADERS:
        assert "sW0rdf1sh" not in mask(text), text
        assert "***" in mask(text), text


def test_secrets_of_the_environment_are_masked(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert mask(f"x {SECRET} y") == "x *** y"
    assert mask("a=sW0rdf1sh%2FAb%2BCd") == "a=***"


def test_every_error_event_and_termination_message_is_masked(tmp_path, monkeypatch):
    uri, path = "s3://AKIA:sW0rdf1sh@bucket/x", tmp_path / "events.jsonl"
    assert str(UserError(f"cannot read {uri}")) == "cannot read s3://***@bucket/x"
    events.append(path, events.WarmStart(uri=uri))
    monkeypatch.setenv(events.VARIABLE, str(path))
    events.emit(events.FromScratch(reason=f"nothing at {uri}"))
    termination.reserve(tmp_path)
    termination.write(tmp_path, f"cannot read {uri}")
    assert len(list(events.read(path))) == 2
    for file in tmp_path.iterdir():
        assert "sW0rdf1sh" not in file.read_text()


@pytest.mark.parametrize("text", [WITH_SECRETS[row][0] for row in (0, 5, 9, 13)])
@pytest.mark.parametrize("key", ["storage.root", "training.warm_start", "data.manual_dir", "name"])
def test_a_configuration_with_credentials_is_refused_without_them(key, text):
    for refused in (f"{key}={text}", f"{key}=[{{x: '{text}'}}]", f"{key}={{'{text}': 1}}"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [refused])
        assert "df1sh" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_free_values_and_keys_are_looked_through():
    with pytest.raises(
        ConfigError, match=r"^model\.args\.at: a URI contains a user name or password"
    ):
        parse_config({"model": {"args": {"at": ["http://u:sW0rdf1sh@h"]}}})


def test_a_section_made_by_code_is_checked_too():
    with pytest.raises(ValueError, match="a URI contains a user") as caught:
        StorageConfig(root="s3://AKIA:sW0rdf1sh@bucket")
    assert "sW0rdf1sh" not in str(caught.value)


def test_a_placeholder_of_the_platform_is_refused():
    for value in ("{{$.inputs.parameters['x']}}", "{{channel:task=a;name=b}}", "{{workflow.name}}"):
        with pytest.raises(ConfigError, match=r"^data\.manual_dir: .* contains '{{'.*\Z"):
            parse_config({"data": {"manual_dir": f"/a/{value}"}})


def test_an_option_of_a_root_that_is_none_is_refused_without_its_value():
    with pytest.raises(ConfigError, match="'foo' is not an option") as caught:
        load_config(None, ["storage.root=minio://bucket/x?foo=sW0rdf1sh"])
    assert "sW0rdf1sh" not in str(caught.value)


CLOSED = [
    "https://kfp.example.com",
    "http://127.0.0.1:80",
    "http://[::1]:80",
    "http://localhost:8888",
    "http://minio:9000",
    "http://ml-pipeline.kubeflow.svc:8888",
    "http://ml-pipeline.kubeflow.svc.cluster.local:8888",
    "http://[x",
    "",
]


def test_what_is_sent_openly():
    openly = ["http://kfp.example.com", "http://10.0.0.7:9000/x"]
    assert [url for url in openly + CLOSED if is_sent_openly(url)] == openly


# Characters that set colors or a window title, ring a bell, reverse text, or are invisible.
COMMANDS = [
    "\x1b[2J", "\x1b]0;t\x07", "\x9b1A", "\b", "\r", "\0", "\u202e", "\u2067", "\u200f", "\u061c",
    "\ufeff", "\u200b", "\u2028", "\udc80", "\U000e0041",
]  # fmt: skip


def test_what_a_terminal_or_a_page_obeys_becomes_an_escape():
    for command in COMMANDS:
        written = printable(f"a{command}b")
        assert written.isprintable(), ascii(command)
        assert json.loads(f'"{written}"') == f"a{command}b"
        assert str(UserError(f"a{command}b")).isprintable(), ascii(command)
        assert mask(f"http://u:p@h/{command}").isprintable(), ascii(command)


def test_other_text_stays():
    texts = ["größe", "日本", "👩\u200d💻", "क\u200cष", "a\u00a0b", "%&", "a\n\tb"]
    assert [printable(text) for text in texts] == texts


@given(st.text())
def test_a_line_is_one_line(text):
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert printable(line) == line
