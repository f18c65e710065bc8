"""A whole run writes none of the secrets that are around it, in a good end and in a bad one."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.pipelines.called import call, setting
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

SECRETS = {
    name: f"{name}/Pl4nted+{number}="
    for number, name in enumerate(
        ["key", "session", "proxy", "file", "token", "cookie", "kube", "google", "pod"]
    )
}
FEW = setting(
    training__steps=20,
    training__strategy="single",
    training__checkpoint_every=10,
    training__validate_every=10,
    gate__min__accuracy=0.01,
)
CREDENTIALS = "[default]\naws_access_key_id = other\naws_secret_access_key = {}\n"
KUBECONFIG = "apiVersion: v1\nkind: Config\nusers: [{{name: a, user: {{token: '{}'}}}}]\n"
# A body of a store whose words have what it was sent.
REFUSAL = (
    "<Error><Code>AccessDenied</Code><Message>denied: Authorization: Bearer {0} at "
    "https://u:{0}@h/x?X-Amz-Signature={0}</Message></Error>"
)


@pytest.fixture
def planted(tmp_path, monkeypatch, s3):
    """Secrets in variables and in files, as a person or a pod has them."""
    home = tmp_path / "home"
    files = {
        ".aws/credentials": CREDENTIALS.format(SECRETS["file"]),
        ".kube/config": KUBECONFIG.format(SECRETS["kube"]),
        "google.json": f'{{"type": "authorized_user", "refresh_token": "{SECRETS["google"]}"}}',
        "token": SECRETS["pod"],
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    proxy = f"http://user:{quote(SECRETS['proxy'], safe='')}@127.0.0.1:9"
    variables = {
        "HOME": str(home),
        "AWS_SECRET_ACCESS_KEY": SECRETS["key"],
        "AWS_SESSION_TOKEN": SECRETS["session"],
        "KFP_EXISTING_TOKEN": SECRETS["token"],
        "KFP_COOKIES": f"session={SECRETS['cookie']}",
        "KF_PIPELINES_SA_TOKEN_PATH": str(home / "token"),
        "GOOGLE_APPLICATION_CREDENTIALS": str(home / "google.json"),
        "KUBECONFIG": str(home / ".kube/config"),
        "HTTPS_PROXY": proxy,
        "HTTP_PROXY": proxy,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return s3


def found_in(texts):
    """Yield the name of each secret that is in a text, as it is or encoded, and where."""
    for name, secret in SECRETS.items():
        data = secret.encode()
        forms = {data, quote(secret, safe="").encode(), quote(secret).encode()}
        # In base64 the bytes before a text move it by 0, 1 or 2.
        for before in range(3):
            encoded = base64.b64encode(b"x" * before + data)[4 if before else 0 : -4]
            forms |= {encoded, encoded.translate(bytes.maketrans(b"+/", b"-_"))}
        for where, content in texts.items():
            if any(form in content for form in forms):
                yield name, where


def written(tmp_path: Path, called, server, bucket):
    folder = tmp_path / "work"
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {key: server.content(bucket, key) for key in server.keys(bucket)}
    return texts | {"stdout": called.out.encode(), "stderr": called.err.encode()}


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_found_in_every_form(secret):
    plain = SECRETS[secret]
    for text in (plain, quote(plain, safe=""), base64.b64encode(f"user:{plain}".encode()).decode()):
        assert (secret, "x") in list(found_in({"x": f"a {text} b".encode()}))


def test_a_whole_run_writes_no_secret(planted, tmp_path):
    bucket = bucket_name()
    planted.create_bucket(bucket)
    (tmp_path / "work").mkdir()
    root = setting(storage__root=f"s3://{bucket}/runs")
    done = call("run", tmp_path / "work" / "runs", *FEW, *root, cwd=tmp_path / "work")
    assert done.code == 0, done.err + done.log
    texts = written(tmp_path, done, planted, bucket)
    assert {"events.jsonl", "config.json", "pipeline.log"} <= {Path(name).name for name in texts}
    assert any(name.endswith("report.html") for name in texts)
    assert list(found_in(texts)) == []


def test_a_run_that_the_store_refuses_writes_no_secret(planted, tmp_path):
    bucket = bucket_name()
    planted.create_bucket(bucket)
    (tmp_path / "work").mkdir()
    body = REFUSAL.format(SECRETS["key"]).encode()
    planted.plan.add(Fault(403, method="PUT", path="MANIFEST", body=body, times=99))
    root = setting(storage__root=f"s3://{bucket}/runs")
    done = call("run", tmp_path / "work" / "runs", *FEW, *root, cwd=tmp_path / "work")
    assert done.code == 1
    assert list(found_in(written(tmp_path, done, planted, bucket))) == []
