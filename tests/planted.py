"""Plants secrets where a user or a pod has them, and searches for them in outputs."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

SECRETS = {
    name: f"{name}/Pl4nted+{number}="
    for number, name in enumerate(
        ["key", "session", "proxy", "file", "token", "cookie", "kube", "google", "pod"]
    )
}
_CREDENTIALS = "[default]\naws_access_key_id = other\naws_secret_access_key = {}\n"
_KUBECONFIG = "apiVersion: v1\nkind: Config\nusers: [{{name: a, user: {{token: '{}'}}}}]\n"


def plant(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all secrets into environment variables, and into files below a home folder."""
    files = {
        ".aws/credentials": _CREDENTIALS.format(SECRETS["file"]),
        ".kube/config": _KUBECONFIG.format(SECRETS["kube"]),
        "google.json": f'{{"type": "authorized_user", "refresh_token": "{SECRETS["google"]}"}}',
        "token": SECRETS["pod"],
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")
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


def found_in(texts: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the name and the file of each secret in the texts, plain or encoded."""
    for name, secret in SECRETS.items():
        data = secret.encode()
        forms = {data, quote(secret, safe="").encode(), quote(secret).encode()}
        # The base64 form of a text depends on the number of bytes before it, modulo 3.
        for before in range(3):
            encoded = base64.b64encode(b"x" * before + data)[4 if before else 0 : -4]
            forms |= {encoded, encoded.translate(bytes.maketrans(b"+/", b"-_"))}
        for where, content in texts.items():
            if any(form in content for form in forms):
                yield name, where
