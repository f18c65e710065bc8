"""The CI workflow calls only targets of the Makefile, and the issue templates are valid."""

import re

import yaml

from tests.conftest import ROOT

FORGE = ROOT / ".github"


def test_the_workflow_runs_targets_that_exist():
    workflow = yaml.safe_load((FORGE / "workflows" / "tests.yaml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["make"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    called = job["strategy"]["matrix"]["target"]
    assert {"lint", "test", "test-slow", "docs"} <= set(called) <= targets
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make setup", "make ${{ matrix.target }}"]
    (python,) = [each["with"] for each in job["steps"] if "setup-python" in each.get("uses", "")]
    assert f'">={python["python-version"]}"' in (ROOT / "pyproject.toml").read_text()


def test_each_template_asks_for_something():
    templates = list((FORGE / "ISSUE_TEMPLATE").glob("*.yaml"))
    assert len(templates) == 2
    for path in templates:
        template = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= template.keys()
        ids = [each["id"] for each in template["body"]]
        assert len(ids) == len(set(ids))
