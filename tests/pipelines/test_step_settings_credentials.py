"""A root on KFP's own kind of store, opened by nothing but what the compiled steps set."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.tfjob.manifest import Place, manifest
from pipelines.compile import compile_pipeline
from tests.stores.fixtures import bucket_name
from tests.stores.s3_server import s3_server
from trainer.cluster.launcher import Job
from trainer.config.load import parse_config
from trainer.config.run_parameters import to_parameters

ROOT = Path(__file__).parents[2]
# What KFP's secret `mlpipeline-minio-artifact` holds, and what one of a person's own may hold.
SECRETS = {
    "KFP's own": {"accesskey": "kfp", "secretkey": "hush-hush"},
    "one's own": {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "hush-hush"},
}
# Nothing of this machine may help.
BARE = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    "AWS_CONFIG_FILE": "/nowhere",
}


@pytest.fixture(scope="module")
def server():
    with s3_server() as found:
        yield found


@pytest.fixture
def bucket(server):
    name = bucket_name()
    server.create_bucket(name)
    return name


@pytest.fixture
def root(server, bucket):
    address = server.url.removeprefix("http://")
    return f"minio://{bucket}/a root?endpoint={address}&disableSSL=true"


def variables_of(step, secret, tmp_path):
    """Return what Kubernetes gives a step: of a secret those keys that it has."""
    compile_pipeline(tmp_path / "pipeline.yaml")
    text = (tmp_path / "pipeline.yaml").read_text(encoding="utf-8")
    _, platform = yaml.load_all(text, yaml.CSafeLoader)
    pod = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][f"exec-{step}"]
    (secret_env,) = pod["secretAsEnv"]
    keys = {each["envVar"]: each["secretKey"] for each in secret_env["keyToEnv"]}
    return {variable: secret[key] for variable, key in keys.items() if key in secret}


def run(module, name, folder, root, variables):
    arguments = to_parameters(parse_config({"storage": {"root": root}}))
    if name == "two_steps":
        arguments["path"] = str(folder / "kept.json")
    (folder / "arguments.json").write_text(json.dumps(arguments), encoding="utf-8")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        [sys.executable, "-m", module, name, str(folder)],
        cwd=ROOT,
        env={"PATH": path, "TMPDIR": str(folder), **BARE, **variables},
        check=False,
        text=True,
        capture_output=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("secret", SECRETS)
def test_the_first_step_reads_the_store(root, secret, tmp_path):
    given = variables_of("resolve-config", SECRETS[secret], tmp_path)
    ended = run("tests.pipelines.two_steps", "two_steps", tmp_path, root, given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert kept["root"] == root
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert b"hush-hush" not in path.read_bytes(), path
    assert "hush-hush" not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_without_the_secret_a_step_starts_and_says_what_it_misses(root, tmp_path):
    ended = run("tests.pipelines.two_steps", "two_steps", tmp_path, root, {})
    assert ended.returncode == 1
    (line,) = re.findall(r"flotilla: resolve_config: .*", ended.stdout)
    assert "no credentials" in line


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_dataset_is_published_there(root, server, bucket, tmp_path):
    given = variables_of("prepare-data", SECRETS["KFP's own"], tmp_path)
    ended = run("pipelines.runs.local_child", "prepare", tmp_path, root, given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    keys = server.keys(bucket)
    assert [key for key in keys if re.fullmatch(r"a root/datasets/digits-\w+/MANIFEST.json", key)]
    assert "hush-hush" not in ended.stdout + ended.stderr


@pytest.mark.parametrize("secret", SECRETS)
def test_a_task_of_the_job_gets_the_same_as_a_step(root, secret, tmp_path):
    job = Job(config=parse_config({}), dataset=root, checkpoints=f"{root}/c", workdir=Path())
    tree = manifest(job, Place(namespace="models"))
    pod = tree["spec"]["tfReplicaSpecs"]["PS"]["template"]["spec"]["containers"][0]
    references = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in pod["env"]
        if "valueFrom" in each
    }
    assert all(each["optional"] for each in references.values())
    held = SECRETS[secret]
    found = {name: held[each["key"]] for name, each in references.items() if each["key"] in held}
    assert found == variables_of("train-model", held, tmp_path)
