"""The commands, settings, paths, links and targets in the documents exist."""

import ast
import importlib
import inspect
import re
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml

import flotilla
from flotilla.components.launchers import render_job
from flotilla.pipelines.compile import compile_pipeline
from flotilla.trainer.config.data import LIMITS, RULES
from flotilla.trainer.config.load import REMOVED, parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT
from tests.docs.claims import missing_path, wrong_command, wrong_key
from tests.docs.markdown import page, read, simple_commands
from tests.house_rules.source import files, python_files, text
from tests.house_rules.test_sizes import BUDGETS

PAGES = [read(ROOT / path, ROOT) for path in files() if path.suffix == ".md"]
# The changelog names commands and settings that were removed.
NOT_OF_THE_PAST = [each for each in PAGES if each.path.name != "CHANGELOG.md"]
SECTIONS = {name for name in Config.model_fields if name != "name"}
VARIABLE = re.compile(r"FLOTILLA_[A-Z_]+")


@cache
def variables_of_the_code():
    return {
        name
        for source in (text("Makefile"), *map(text, python_files()))
        for name in VARIABLE.findall(source)
    }


def test_every_command_is_one():
    commands = [each for document in PAGES for each in document.commands()]
    assert not [(where, why) for where, words in commands if (why := wrong_command(words))]


def test_every_command_in_the_prose_is_one():
    spoken = {
        tuple(words): page.path
        for page in NOT_OF_THE_PAST
        for each in page.inline()
        for words in spoken_commands(each)
    }
    wrong = {words: wrong_command(list(words), whole=False) for words in spoken}
    assert not [(spoken[words], words, why) for words, why in wrong.items() if why]


def spoken_commands(inline):
    return simple_commands(inline) if inline.startswith(("flotilla ", "make ")) else []


def test_every_snippet_of_a_configuration_is_valid():
    for where, block in blocks("yaml"):
        tree = yaml.load(block.text, yaml.CSafeLoader)
        assert isinstance(tree, dict), where
        if "apiVersion" not in tree:
            # Also render the job, which rejects settings that the engine does not support.
            config = parse_config(tree)
            kind = "JobSet" if config.cluster.launcher == "jobset" else "TFJob"
            assert render_job(config)["kind"] == kind, where


def blocks(language):
    for document in PAGES:
        for block in document.of(language):
            yield f"{document.path}:{block.line}", block


def test_every_key_of_the_configuration_is_one():
    looks = re.compile(rf"({'|'.join(SECTIONS)})(\.[a-z_]+)+(: \S+)?")
    wrong = cache(wrong_key)
    for document in NOT_OF_THE_PAST:
        gone = REMOVED if "decisions" in document.path.parts else ()
        named = [each for each in document.inline() if looks.fullmatch(each) and each not in gone]
        found = [why for each in named if not is_module(each) and (why := wrong(each))]
        assert not found, document.path


def is_module(word):
    """Return whether a word such as `storage.newest` or `training.py` is a module or a file."""
    package, _, name = word.partition(".")
    return name in {"html", "py", "yaml"} or (ROOT / "trainer" / package / f"{name}.py").exists()


def test_every_run_parameter_is_one(tmp_path):
    path = tmp_path / "pipeline.yaml"
    compile_pipeline(path)
    pipeline = next(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))
    prose = " ".join(word for document in PAGES for word in document.prose.split())
    named = set(re.findall(r"run parameter `(\w+)`", prose))
    assert not named - set(pipeline["root"]["inputDefinitions"]["parameters"])


def test_every_path_is_there():
    named = [(document.path, each) for document in PAGES for each in document.inline()]
    assert not [each for each in named if missing_path(each[1])]


def test_every_link_leads_somewhere():
    fragments = cache(lambda path: read(path, ROOT).fragments())
    for where, link in [(each.path, link) for each in PAGES for link in each.links()]:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        path = (ROOT / where.parent / target).resolve() if target else ROOT / where
        assert path.exists(), (where, link)
        assert path.is_relative_to(ROOT), (where, link)
        assert not fragment or fragment in fragments(path), (where, link)


def test_every_variable_is_read_by_the_code():
    for document in PAGES:
        whole = document.prose + "".join(block.text for block in document.blocks)
        assert not set(VARIABLE.findall(whole)) - variables_of_the_code(), document.path


def test_every_import_finds_what_it_names():
    for where, block in blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flotilla"):
                module = importlib.import_module(node.module)
                absent = [each.name for each in node.names if not hasattr(module, each.name)]
                assert not absent, where


def test_every_call_of_the_public_interface_is_one():
    calls = [
        (where, name, node)
        for where, block in blocks("python")
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and (name := public_name(node.func))
    ]
    for where, name, node in calls:
        assert name.split(".")[0] in flotilla.__all__, (where, name)
        function = reduce(getattr, name.split("."), flotilla)
        keywords = {each.arg: ... for each in node.keywords if each.arg}
        try:
            inspect.signature(function).bind_partial(*node.args, **keywords)
        except TypeError as error:
            pytest.fail(f"{where}: flotilla.{name}: {error}")


def public_name(node):
    """Return the name below `flotilla` that a page uses, or ""."""
    words = ast.unparse(node)
    return words.removeprefix("flotilla.") if re.fullmatch(r"flotilla(\.\w+)+", words) else ""


def test_every_block_has_a_known_language():
    # A `text` block shows output. All other blocks are checked above or run by `test_guides.py`.
    assert {block.language for document in PAGES for block in document.blocks} <= {
        "", "dockerfile", "python", "sh", "text", "yaml",
    }  # fmt: skip


def test_every_page_is_two_links_away_from_the_readme():
    pages = {
        document.path: document
        for document in PAGES
        if document.path.parts[0] == "docs" or len(document.path.parts) == 1
    }

    def linked(path):
        targets = [link.partition("#")[0] for link in pages[path].links()]
        found = {(ROOT / path.parent / target).resolve() for target in targets if target}
        below = {each / "README.md" if each.is_dir() else each for each in found}
        return {each.relative_to(ROOT) for each in below if each.is_relative_to(ROOT)} & set(pages)

    (readme,) = (path for path in pages if str(path) == "README.md")
    first = linked(readme)
    second = set().union(*map(linked, first))
    decisions = {path for path in pages if "decisions" in path.parts}
    assert not set(pages) - {readme} - first - second - decisions


def test_every_room_has_a_row_and_a_file_to_read_first():
    part = text("docs/where-is-what.md").partition("## Rooms\n\n")[2].partition("\n\n")[0]
    named = set()
    for line in part.splitlines():
        cells = line.partition(". Read ")
        rows, files_first = (
            re.findall(r"`([\w/]+(?:\.py)?)`", each)
            for each in (cells[0].partition(": ")[0], cells[2])
        )
        folders = [ROOT / row for row in rows]
        named |= {row.rstrip("/") for row in rows}
        for name in files_first:
            assert any((folder / name).is_file() for folder in [ROOT, *folders]), line
    assert not set(BUDGETS) - named - {"trainer"}


def test_a_page_is_taken_apart():
    prose = "# A b\n\nSay `x y`, [z](a.md#b).\n\n"
    text = f"{prose}    one \\\n        two\n\n    three\n\n```yaml\na: 1\n```\n"
    found = page(ROOT / "a.md", text)
    assert [(block.language, block.line) for block in found.blocks] == [("", 5), ("yaml", 11)]
    assert [words for _, words in found.commands()] == [["one", "two"], ["three"]]
    assert found.inline() == ["x y"]
    assert found.links() == ["a.md#b"]
    assert found.fragments() == {"a-b"}


def test_a_line_is_taken_apart():
    line = '$ A=1 flotilla run --set "a b=c" | tee log && make x; sleep 1 # and so on'
    found = simple_commands(line)
    assert found[0] == ["flotilla", "run", "--set", "a b=c"]
    assert ["make", "x"] in found
    assert found[-1] == ["sleep", "1"]


@pytest.mark.parametrize(
    "line",
    [
        "flotilla runn",
        "flotilla run --workdirs x",
        "flotilla models shows digits",
        "flotilla run configs/none.yaml",
        "flotilla run --set training.stepz=3",
        "A=1 .venv/bin/flotilla run --set training.steps=x # note",
        "cd x && flotilla models promote digits",
        "make tset",
        "make chaos TIMES=3",
        'make run ARGS="--jsn"',
        "python -m flotilla.trainer task --config a --nothing",
        "python -m pdb -m flotilla.trainer task --config a",
        "kubectl apply --kustomize deploy/overlays/none",
        "pip install 'kfp-flotilla[s4]'",
    ],
)
def test_a_wrong_command_is_seen(line):
    document = page(ROOT / "a.md", f"Text.\n\n    {line}\n")
    assert [words for _, words in document.commands() if wrong_command(words)]


@pytest.mark.parametrize(
    "line",
    [
        "flotilla run configs/mnist.yaml --set data.manual_dir=FOLDER > log",
        "flotilla manifest | kubectl apply -f -",
        "X=1 flotilla run \\\n        --set training.steps=3",
        "flotilla models rollback digits # and again",
        "make chaos RUNS=3 SEED=1",
        'make run ARGS="configs/mnist.yaml --json"',
        "python -m flotilla.trainer task --config a --dataset file:///d --checkpoints file:///c "
        "--workdir w",
        "kubectl get pods",
    ],
)
def test_a_right_command_passes(line):
    document = page(ROOT / "a.md", f"Text.\n\n    {line}\n\nMore.\n\n```sh\n{line}\n```\n")
    found = [words for _, words in document.commands()]
    assert len(found) >= 2
    assert not [words for words in found if wrong_command(words)]


def test_prose_may_name_a_command_without_its_arguments():
    assert not wrong_command(["flotilla", "compare"], whole=False)
    assert wrong_command(["flotilla", "compare"])
    assert wrong_command(["flotilla", "compare", "--nothing"], whole=False)


@pytest.mark.parametrize(
    ("is_wrong", "wrong", "right"),
    [
        (wrong_key, ["training.stepz", "cluster.kubernetes.pod.imag", "cluster.launcher: moon"],
         ["model.args.hidden_units", "cluster.kubernetes.worker.env", "cluster.launcher: tfjob"]),
        (missing_path, ["trainer/none.py"], ["trainer/config/schema.py", "configs/mnist*.yaml"]),
    ],
)  # fmt: skip
def test_a_wrong_key_or_path_is_seen(is_wrong, wrong, right):
    assert all(map(is_wrong, wrong))
    assert not any(map(is_wrong, right))


GUIDE = (ROOT / "docs" / "how-to" / "data-gate.md").read_text(encoding="utf-8")


def entries(title):
    part = GUIDE.partition(f"\n{title}:\n\n")[2].partition("\n\n")[0]
    return re.findall(r"^- `(\w+)` \((\S+)\): (.+)$", part, re.MULTILINE)


def test_rules_and_limits_are_those_of_the_configuration():
    rules = entries("These are the rules, with their default actions and what they find")
    assert rules == [(name, action, what) for name, (action, what) in RULES.items()]
    assert entries("These are the limits, with their defaults") == [
        (name, f"{default:g}", what) for name, (default, _, _, what) in LIMITS.items()
    ]


MOVE = ROOT / "docs" / "how-to" / "move-to-jobset.md"
CHOOSE = ROOT / "docs" / "how-to" / "choose-an-engine.md"
ANOTHER = {
    "job.scheduling": {"job": {"scheduling": {"gang": True}}},
    "job.clean_pod_policy": {"job": {"clean_pod_policy": "All"}},
    "pod.restart_policy": {"pod": {"restart_policy": "Never"}},
}


def test_what_the_page_leaves_out_is_refused_by_jobsets_and_taken_by_tfjobs():
    part = MOVE.read_text(encoding="utf-8").partition("| leave out |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w.]+)`", part, re.MULTILINE) == list(ANOTHER)
    for key, tree in ANOTHER.items():
        section, _, name = key.partition(".")
        jobset, tfjob = (
            parse_config({"cluster": {"launcher": launcher, "kubernetes": tree}})
            for launcher in ("jobset", "tfjob")
        )
        # The error for a setting that all roles share names one of the roles.
        role = r"\w+" if section == "pod" else section
        with pytest.raises(ConfigError, match=rf"cluster\.kubernetes\.{role}\.{name}: "):
            render_job(jobset)
        assert render_job(tfjob)["kind"] == "TFJob"


def granted(role):
    """Return the verbs that `deploy/` grants to a role, by resource."""
    text = (ROOT / "deploy" / "base" / "rbac.yaml").read_text(encoding="utf-8")
    documents = list(yaml.load_all(text, yaml.CSafeLoader))
    (found,) = (
        each for each in documents if each["kind"] == "Role" and each["metadata"]["name"] == role
    )
    return {name: rule["verbs"] for rule in found["rules"] for name in rule["resources"]}


def test_the_page_names_the_permissions_that_are_new():
    prose = " ".join(MOVE.read_text(encoding="utf-8").split())
    launcher, tasks = prose.partition("The launcher now also needs ")[2].split("; the tasks need ")
    for role, part in (("flotilla-launcher", launcher), ("flotilla-trainer", tasks)):
        named = dict(re.findall(r"`(\w+)` \(([^)]+)\)", part.partition(".")[0]))
        assert "leases" in named
        for resource, verbs in named.items():
            assert re.findall(r"`(\w+)`", verbs) == granted(role)[resource]


def test_the_page_of_the_choice_names_every_launcher():
    cells = re.findall(r"^\| `(\w+)` \|", CHOOSE.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = parse_config({}).cluster.__class__.model_fields["launcher"].annotation
    assert set(cells) == set(kinds.__args__)


TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", ["kfp_instance", "kubernetes"])
def test_each_row_names_a_test_of_the_stand_in(folder):
    written = (TESTS / folder / "README.md").read_text(encoding="utf-8")
    lines = [line for line in written.splitlines() if line.startswith("- ")]
    assert len(lines) > 10
    for line in lines:
        behaviour = re.fullmatch(r"- .+: (`[\w./]+\.py::\w+`.*)", line)
        assert behaviour, line
        named = re.findall(r"`([\w./]+\.py)::(\w+)`", behaviour[1])
        for file, test in named:
            tree = ast.parse((TESTS / folder / file).read_text(encoding="utf-8"))
            functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert test in functions, f"{folder}/README.md names {file}::{test}, which is not there"
