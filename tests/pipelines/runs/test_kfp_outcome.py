"""How a run on an instance ended: what `submit --wait` and `status` say, whatever is left of it."""

import pytest

from pipelines.runs.kfp_nodes import Pod
from pipelines.runs.kfp_outcome import cause_of, explained
from tests.kfp_instance.workflow import IMAGE
from trainer import storage


@pytest.fixture
def remote(remote, uploaded):  # noqa: ARG001
    """Call an instance that has our pipeline."""
    return remote


# The store of a default installation: nobody outside its cluster can read it.
INSIDE = "minio://mlpipeline/v2/artifacts"


def begin(step):
    def happen(workflow, run):
        run["state"] = "RUNNING"
        workflow.begin(step)

    return happen


def done(step, **metrics):
    return [begin(step), lambda workflow, _run: workflow.end(step, metrics=metrics)]


def over(state="SUCCEEDED"):
    def happen(workflow, run):
        run["state"] = state
        if workflow.pods_go:
            workflow.lose_pods()

    return happen


def failed(step, words="", message=""):
    def happen(workflow, _run):
        if words:
            workflow.end(step, "FAILED", error=words)
        else:
            workflow.say_begin(step)
            workflow.stop(step, "FAILED", message)

    return [begin(step), happen, *done("finish"), over("FAILED")]


def skip(workflow, _run):
    workflow.skip()


BLESSED = [
    *done("train_model", global_step=1500, handed_on_step=1000),
    *done("evaluate_model", accuracy=0.97),
    *done("check_gate", decision="blessed", reasons=[]),
    *done("export_model"),
    *done("register_model", decision="promoted", version=3),
    *done("finish"),
    over(),
]
GATE_REFUSED = [
    *done("check_gate", decision="refused", reasons=["accuracy 0.5 is below 0.95"]),
    skip,
    *done("finish"),
    over(),
]
UNCHANGED = [
    *done("resolve_config", decision="unchanged", reasons=["those of digits-1"]),
    skip,
    *done("finish"),
    over(),
]
REGISTRY_REFUSED = [
    *done("check_gate", decision="blessed", reasons=[]),
    *done("export_model"),
    *done("register_model", decision="refused", reasons=["the champion has changed"]),
    over(),
]
NAN = "the loss is nan at global step 20"


def terminated(workflow, run):
    run["state"] = "CANCELING"
    workflow.terminate()


CANCELLED = [begin("train_model"), terminated, over("FAILED")]


@pytest.fixture(params=["api", "page", "api, a day later", "page, a day later"])
def waits(request, instance, remote):
    """Submit a run and wait for its end, with the pods there or gone, by API or interface."""
    address, _, later = request.param.partition(", ")
    instance.has_ui = address == "page"

    def wait(play):
        def mark(workflow, _run):
            workflow.pods_go = bool(later)

        instance.store.play = [mark, *play]
        return remote("submit", "--wait", "--json")

    return wait


@pytest.fixture
def waited(instance, remote):
    """Submit a run and wait for its end, by the address of the API, with its pods there."""

    def wait(play):
        instance.store.play = [*play]
        return remote("submit", "--wait", "--json")

    return wait


def test_blessed_is_0_with_metrics_and_places(waits):
    answer = waits(BLESSED)
    assert (answer.code, answer.json["status"]) == (0, "blessed"), answer.err
    assert answer.json["metrics"] == {"accuracy": 0.97}
    assert (answer.json["global_step"], answer.json["handed_on_step"]) == (1500, 1000)


def test_refused_is_3_with_its_reasons(waits):
    answer = waits(GATE_REFUSED)
    assert (answer.code, answer.json["status"]) == (3, "refused")
    assert answer.json["message"] == "accuracy 0.5 is below 0.95"


def test_nothing_new_is_0_and_says_so(waits):
    answer = waits(UNCHANGED)
    assert (answer.code, answer.json["status"]) == (0, "unchanged")
    assert answer.json["message"] == "those of digits-1"


def test_refused_by_the_registry_is_3(waited):
    answer = waited(REGISTRY_REFUSED)
    assert (answer.code, answer.json["status"]) == (3, "refused")
    assert answer.json["message"] == "the champion has changed"


def test_failed_is_1_with_what_the_step_said(waits):
    answer = waits(failed("train_model", NAN))
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"] == f"train_model: {NAN}"


def test_killed_is_1_with_what_kfp_said(waited):
    answer = waited(failed("train_model", message="main: OOMKilled (exit code 137)"))
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"] == (
        "train_model: its pod failed (main: OOMKilled (exit code 137)): "
        "its memory was not enough: raise step_memory"
    )


def test_cancelled_is_130(waits):
    answer = waits(CANCELLED)
    assert (answer.code, answer.json["status"]) == (130, "canceled"), answer.err
    assert answer.json["message"] == "the run was cancelled"


@pytest.mark.parametrize("has_ui", [False, True])
def test_it_is_the_same_for_a_person_who_looks_later(instance, remote, has_ui):
    instance.has_ui = has_ui
    instance.store.play = [*BLESSED]
    assert remote("submit", "--wait").code == 0
    [(run_id, workflow)] = instance.store.workflows.items()
    workflow.lose_pods()
    answer = remote("status", run_id, "--json")
    assert (answer.json["status"], answer.json["metrics"]) == ("blessed", {"accuracy": 0.97})


def test_a_run_that_was_cancelled_and_tried_again_is_what_it_became(instance, remote):
    def again(_workflow, run):
        run["state"] = "RUNNING"

    instance.store.play = [begin("train_model"), terminated]
    remote("submit")
    [run_id] = instance.store.runs
    for _ in range(2):
        remote("status", run_id)
    instance.store.end_run(run_id, "FAILED")
    assert remote("status", run_id, "--json").json["status"] == "canceled"
    assert remote("runs", "--json").json["runs"][0]["state"] == "CANCELED"
    instance.store.play = [again]
    remote("status", run_id)
    instance.store.end_run(run_id, "FAILED")
    assert remote("status", run_id, "--json").json["status"] == "failed"


def test_a_record_that_was_not_written_does_not_fail_the_run(instance, remote):
    instance.store.play = [*BLESSED[:-1], over()]
    remote("submit", "--wait")
    [workflow] = instance.store.workflows.values()
    at = storage.join(workflow.root, workflow.run_id, "steps", "evaluate_model.json")
    storage.local_path(at).unlink()
    answer = remote("status", workflow.run_id, "--json")
    assert (answer.json["status"], answer.json["metrics"]) == ("blessed", {})
    assert any(line.split()[:2] == ["evaluate_model", "done"] for line in answer.out.splitlines())


# A store that this machine cannot read.


@pytest.fixture
def inside(instance, monkeypatch):
    instance.store.pipeline_root = INSIDE
    monkeypatch.setattr("pipelines.runs.kfp_outcome.STORE_SECONDS", 0.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("inside")
def test_without_the_store_a_promotion_is_not_taken_for_granted(waited):
    answer = waited(BLESSED)
    assert (answer.code, answer.json["status"]) == (1, "unknown")
    assert answer.json["message"].startswith(
        "the run is done, but what the registry decided cannot be read: its metrics are below "
        f"{INSIDE}/flotilla/{answer.json['run_id']}, which cannot be read here: "
    )


@pytest.mark.usefixtures("inside")
def test_without_the_store_a_gate_that_refused_is_seen(waited):
    answer = waited(GATE_REFUSED)
    assert (answer.code, answer.json["status"]) == (3, "refused")
    assert answer.json["message"].startswith("the gate refused the model; its metrics are below ")


@pytest.mark.usefixtures("inside")
def test_without_the_store_a_failure_is_its_step(waited):
    answer = waited(failed("train_model", NAN))
    assert (answer.code, answer.json["status"]) == (1, "failed")
    begin, _, rest = answer.json["message"].partition("; ")
    assert begin == "train_model: its pod failed (main: Error (exit code 1))"
    assert rest.startswith("its metrics are below ")


@pytest.mark.usefixtures("inside")
def test_without_the_store_a_cancelled_run_is_130(waited):
    assert waited(CANCELLED).code == 130


@pytest.mark.usefixtures("inside")
def test_the_user_interface_reads_the_store_for_this_machine(instance, waited):
    instance.has_ui = True
    answer = waited(BLESSED)
    assert (answer.code, answer.json["status"]) == (0, "blessed"), answer.err
    assert answer.json["metrics"] == {"accuracy": 0.97}


@pytest.mark.usefixtures("inside")
def test_a_user_interface_of_several_users_may_not_read_it(instance, waited):
    def share(_workflow, _run):
        instance.has_ui = instance.multi_user = True

    answer = waited([share, *BLESSED])
    assert (answer.code, answer.json["status"]) == (1, "unknown"), answer.err


def test_without_nodes_the_records_say_it(instance, remote, tmp_path):
    instance.has_v1beta1 = False
    instance.store.play = [*BLESSED]
    answer = remote("submit", "--wait", "--json", "--set", f"storage.root={tmp_path.as_uri()}")
    assert (answer.code, answer.json["status"]) == (0, "blessed"), answer.err
    assert answer.json["metrics"] == {"accuracy": 0.97}


def test_the_configured_root_is_read(instance, remote, tmp_path):
    root = (tmp_path / "mine").as_uri()
    instance.store.pipeline_root = INSIDE
    instance.store.play = [*BLESSED]
    assert remote("submit", "--wait", "--set", f"storage.root={root}").code == 0
    [run_id] = instance.store.runs
    assert storage.names(storage.join(root, run_id, "steps"))


# What is outside our code.


@pytest.fixture
def no_waiting(monkeypatch):
    for name in ("START_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(f"pipelines.runs.kfp_watch.{name}", 0.0)


PULL = f'ImagePullBackOff: Back-off pulling image "{IMAGE}"'


def waiting(message, step="resolve_config"):
    def happen(workflow, run):
        run["state"] = "RUNNING"
        workflow.wait(step, message)

    return happen


@pytest.mark.usefixtures("no_waiting")
def test_an_image_that_does_not_exist_is_1_with_step_and_image(instance, waits):
    answer = waits([waiting(PULL)])
    assert (answer.code, answer.json["status"]) == (1, "failed")
    said = answer.json["message"]
    assert said.startswith(f"resolve_config: the image {IMAGE} cannot be pulled ({PULL}): name")
    run_id = answer.json["run_id"]
    assert said.endswith(f"cancel it: flotilla cancel {run_id} --endpoint {instance.url}")
    assert not instance.asked(":terminate")


def test_an_image_may_appear_within_a_minute(instance, remote):
    def appears(workflow, _run):
        workflow.end("resolve_config")

    instance.store.play = [waiting(PULL), waiting("ErrImagePull: not found"), appears, *BLESSED]
    answer = remote("submit", "--wait")
    assert answer.code == 0, answer.err
    assert answer.err.count("cannot be pulled") == 1


def test_a_name_of_an_image_that_is_none_is_reported_at_once(instance, remote):
    instance.store.play = [waiting("InvalidImageName: couldn't parse image name")]
    assert remote("submit", "--wait").code == 1
    assert len(instance.asked("GET .*v2beta1/runs/")) == 1


@pytest.mark.usefixtures("no_waiting")
def test_a_pod_that_finds_no_node_is_a_line_and_waits_on(instance, remote):
    words = "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."

    def starts(workflow, _run):
        workflow.end("resolve_config")

    instance.store.play = [waiting(words), waiting(words), starts, *BLESSED]
    answer = remote("submit", "--wait")
    assert answer.code == 0
    assert answer.err.count(f"resolve_config: its pod waits ({words}): no node has the room") == 1


def test_status_says_what_a_run_waits_for(instance, remote):
    instance.store.play = [waiting(PULL)]
    remote("submit")
    [run_id] = instance.store.runs
    answer = remote("status", run_id, "--json")
    assert (answer.code, answer.json["status"]) == (0, "running")
    assert f"the image {IMAGE} cannot be pulled" in answer.err


NOBODY = (
    'pods "flotilla-training-x7z2p-system-dag-driver-1" is forbidden: error looking up service '
    'account kubeflow/nobody: serviceaccount "nobody" not found'
)


def test_a_service_account_that_is_not_there(waited):
    def refused(workflow, run):
        run["state"] = "RUNNING"
        workflow.fail_driver("root", NOBODY)

    answer = waited([refused, over("FAILED")])
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"] == (
        f"the run: KFP's own driver of it failed ({NOBODY}): create this service account, or name "
        "one that is there by --service-account"
    )


def driver_failed(workflow, run):
    run["state"] = "RUNNING"
    workflow.fail_driver("train_model")


@pytest.mark.parametrize(("has_ui", "has_logs"), [(False, True), (True, True), (False, False)])
def test_a_driver_that_failed_is_its_step_with_the_end_of_its_log(
    instance, remote, has_ui, has_logs
):
    instance.has_ui, instance.has_logs = has_ui, has_logs
    instance.store.play = [driver_failed, over("FAILED")]
    answer = remote("submit", "--wait", "--json")
    assert (answer.code, answer.json["status"]) == (1, "failed")
    more = "; F0102 main.go:9] KFP driver: driver.Container(run=1) failed: no such bucket"
    assert answer.json["message"] == (
        "train_model: KFP's own driver of it failed (main: Error (exit code 1)"
        f"{more if has_logs else ''}): check the service account, the pipeline root and its keys, "
        "and the run parameters of the steps such as step_cpu"
    )


@pytest.mark.usefixtures("no_waiting")
def test_a_run_that_kfp_calls_running_for_ever(instance, remote):
    instance.store.play = [driver_failed]
    answer = remote("submit", "--wait", "--json")
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"].startswith("train_model: KFP's own driver of it failed (")
    assert (
        "no pod of the run has begun since then; the run is left as it is, cancel it: "
        in (answer.json["message"])
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_waiting")
def test_a_pod_that_was_lost_is_awaited_until_kfp_makes_it_again(waits):
    def lose(workflow, run):
        run["state"] = "RUNNING"
        workflow.lose_pod("train_model")

    def again(workflow, _run):
        workflow.try_again("train_model")

    answer = waits([begin("train_model"), lose, again, *BLESSED[1:]])
    assert (answer.code, answer.json["status"]) == (0, "blessed")


def test_a_failed_step_is_not_taken_for_the_end(instance, remote):
    # The exit step is still to come.
    instance.store.play = failed("train_model", NAN)
    answer = remote("submit", "--wait", "--json")
    assert answer.json["message"] == f"train_model: {NAN}"
    assert any(line.startswith("finish done") for line in answer.err.splitlines())


DATASET = "gs://bucket/flotilla/datasets/digits-0123"
LINE = "flotilla: prepare_data was taken from KFP's cache: it did not run and has no log\n"


def cached(workflow, run):
    run["state"] = "RUNNING"
    workflow.take_from_cache("prepare_data")


def cache_done(step, **record):
    def happen(workflow, _run):
        workflow.begin(step)
        workflow.write(step, f"words of {step}\n")
        workflow.end(step, **record)

    return happen


def cache_over(state="SUCCEEDED"):
    def happen(_workflow, run):
        run["state"] = state

    return happen


CACHE_BLESSED = (
    cached,
    cache_done(
        "train_model", inputs={"dataset": DATASET}, metrics={"global_step": 9}, uri="gs://b/c"
    ),
    cache_done("check_gate", metrics={"decision": "blessed", "reasons": []}),
    cache_done("register_model", metrics={"decision": "promoted", "version": 3}),
    cache_over(),
)


@pytest.fixture
def run_id(instance, remote):
    assert remote("submit").code == 0
    [run_id] = instance.store.runs
    return run_id


@pytest.fixture
def play(instance, run_id):
    def happen(*things):
        for thing in things:
            thing(instance.store.workflows[run_id], instance.store.runs[run_id])

    return happen


def test_the_dataset_is_what_later_steps_took(instance, remote):
    instance.store.play = [*CACHE_BLESSED]
    answer = remote("submit", "--wait", "--json")
    assert (answer.code, answer.json["status"]) == (0, "blessed")
    assert answer.json["artifacts"]["dataset"] == DATASET
    assert answer.json["artifacts"]["checkpoint"] == "gs://b/c"
    assert answer.json["global_step"] == 9
    lines = answer.err.splitlines()
    [trained] = [line for line in lines if line.startswith("train_model done in ")]
    assert lines.index("prepare_data cached") < lines.index(trained)
    [row, *_] = [line for line in answer.out.splitlines() if line.startswith("prepare_data")]
    assert row.split()[:2] == ["prepare_data", "cached"]


def test_status_of_a_run_that_has_ended(remote, run_id, play):
    play(*CACHE_BLESSED)
    answer = remote("status", run_id, "--json")
    assert answer.json["artifacts"]["dataset"] == DATASET
    assert any(line.split()[:2] == ["prepare_data", "cached"] for line in answer.out.splitlines())


def test_a_dataset_that_no_step_names_is_not_made_up(remote, run_id, play):
    play(
        cached,
        cache_done("train_model"),
        cache_done("check_gate", metrics={"decision": "refused"}),
        cache_over(),
    )
    answer = remote("status", run_id, "--json")
    assert "dataset" not in answer.json["artifacts"]
    [*_, row] = [line for line in answer.out.splitlines() if line.startswith("prepare_data")]
    assert "KFP's cache does not say" in row


def test_a_step_that_was_killed_has_said_what_it_took(remote, run_id, play):
    def killed(workflow, _run):
        workflow.begin("train_model")
        workflow.say_begin("train_model", {"dataset": DATASET})
        workflow.stop("train_model", "FAILED", "main: OOMKilled (exit code 137)")

    play(cached, killed, cache_over("FAILED"))
    answer = remote("status", run_id, "--json")
    assert (answer.json["status"], answer.json["artifacts"]) == ("failed", {"dataset": DATASET})
    assert answer.json["message"].startswith("train_model: its pod failed (main: OOMKilled")


def test_logs_say_so_and_go_on_with_the_others(instance, remote):
    remote("submit")
    [run_id] = instance.store.runs
    for thing in CACHE_BLESSED:
        thing(instance.store.workflows[run_id], instance.store.runs[run_id])
    answer = remote("logs", run_id)
    assert answer.code == 0
    assert answer.err == LINE
    assert "words of train_model" in answer.out


def test_logs_that_are_followed_say_so_once(instance, remote, run_id):
    instance.store.play = [lambda _workflow, _run: None, *CACHE_BLESSED]
    answer = remote("logs", run_id, "-f")
    assert (answer.code, answer.err.count(LINE)) == (0, 1)


def test_logs_of_that_step_alone(remote, run_id, play):
    play(*CACHE_BLESSED)
    answer = remote("logs", run_id, "--step", "prepare-data", "--json")
    assert (answer.code, answer.err) == (0, LINE)
    assert len(answer.out.splitlines()) == 1
    assert answer.json["status"] == "succeeded"


def test_it_is_looked_for_only_until_its_pod_is_skipped(instance, remote, run_id):
    def on_its_way(workflow, run):
        cached(workflow, run)
        # Argo has looked at the group, and at no node in it.
        held.append(workflow.nodes.pop())
        for node in workflow.nodes[-2:]:
            node.update(phase="Running", finishedAt=None)

    def skipped(workflow, _run):
        for node in workflow.nodes[-2:]:
            node.update(phase="Succeeded", finishedAt=held[0]["finishedAt"])
        workflow.nodes.append(held.pop())

    held = []
    instance.store.play = [lambda _workflow, _run: None, on_its_way, skipped, *CACHE_BLESSED[1:]]
    answer = remote("logs", run_id, "-f")
    assert answer.code == 0
    assert "no log of" not in answer.err
    assert answer.err.startswith(LINE)


def test_an_instance_without_logs_is_an_error_all_the_same(instance, remote, run_id, play):
    instance.has_logs = False
    play(*CACHE_BLESSED)
    answer = remote("logs", run_id)
    assert answer.code == 1
    assert LINE in answer.err
    assert "no log of prepare_data" not in answer.err
    assert "gives no log of the run" in answer.err.splitlines()[-1]


def test_a_group_that_a_condition_skipped_is_no_cache(remote, run_id, play):
    play(
        cache_done("check_gate", metrics={"decision": "refused", "reasons": ["too low"]}),
        lambda workflow, _run: workflow.skip(),
        cache_over(),
    )
    answer = remote("status", run_id, "--json")
    assert answer.json["status"] == "refused"
    assert "cached" not in answer.out


def pod(message, state="FAILED", **more):
    values = {"name": "p", "step": "train_model", "is_driver": False, "image": "host/a:1", **more}
    return Pod(state=state, message=message, **values)


# As the kubelet, Argo 4.0.5 and Kubernetes word them.
@pytest.mark.parametrize(
    ("message", "words", "blocks"),
    [
        ("ImagePullBackOff: Back-off pulling", "the image host/a:1 cannot be pulled", True),
        ("ErrImagePull: failed to resolve", "the image host/a:1 cannot be pulled", True),
        ("InvalidImageName: Failed to apply", "the image host/a:1 cannot be pulled", True),
        (
            "Pod failed before main container starts due to ErrImagePull: x",
            "the image host/a:1 cannot be pulled",
            True,
        ),
        ('CreateContainerConfigError: secret "x" not found', "create the secret", True),
        ("Unschedulable: 0/3 nodes are available", "no node has the room", False),
        (
            'Unschedulable: 0/3 nodes are available: persistentvolumeclaim "official" not found.',
            "create the claim in the namespace of the steps",
            True,
        ),
        (
            "Unschedulable: 0/3 nodes are available: pod has unbound immediate "
            "PersistentVolumeClaims.",
            "its claim has no volume",
            True,
        ),
        (
            'Usage of EmptyDir volume "scratch" exceeds the limit "50Gi".',
            "upload with a higher --scratch",
            False,
        ),
        ("is forbidden: exceeded quota: compute", "a larger quota", False),
        ("main: OOMKilled (exit code 137)", "raise step_memory", False),
        (
            "Pod was active on the node longer than the specified deadline",
            "longer than the deadline of the step",
            False,
        ),
        ("PodInitializing", "", False),
    ],
)
def test_each_message_has_its_remedy(message, words, blocks):
    line = explained(pod(message))
    assert line.startswith("train_model: ")
    assert message in line
    assert words in line
    assert bool((found := cause_of(message)) and found.blocks) is blocks


def test_a_pod_that_waits_is_not_said_to_have_failed():
    line = explained(pod("Unschedulable: 0/3 nodes", "PENDING"))
    assert line.startswith("train_model: its pod waits (Unschedulable: 0/3 nodes)")


def test_without_words_of_kfp_it_says_so():
    assert explained(pod("")) == "train_model: its pod failed (KFP says nothing more)"


def test_a_driver_of_the_run_is_no_step():
    line = explained(pod("main: Error (exit code 1)", step="", is_driver=True, image=""), "bad key")
    assert line.startswith(
        "the run: KFP's own driver of it failed (main: Error (exit code 1); bad key): check the"
    )
