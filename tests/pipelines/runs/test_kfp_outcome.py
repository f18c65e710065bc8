"""Tests the outcome that `submit --wait` and `status` report, even after the pods are deleted."""

import pytest

from flotilla.pipelines.runs.kfp_outcome import explain_message, explain_pod
from flotilla.pipelines.runs.kfp_run import Pod
from flotilla.trainer import storage
from tests.kfp_instance.plays import begin, done, over, skip
from tests.kfp_instance.workflow import IMAGE


@pytest.fixture
def remote(remote, uploaded):  # noqa: ARG001
    return remote


INSIDE = "minio://mlpipeline/v2/artifacts"


def failed(step, words="", message=""):
    def happen(workflow, _run):
        if words:
            workflow.end(step, "FAILED", error=words)
        else:
            workflow.say_begin(step)
            workflow.stop(step, "FAILED", message)

    return [begin(step), happen, *done("finish"), over("FAILED")]


BLESSED = [
    *done("resolve_config"), *done("prepare_data"), *done("validate_data", decision="accepted"),
    *done("train_model", global_step=1500, handed_on_step=1000),
    *done("evaluate_model", accuracy=0.97), *done("check_gate", decision="blessed", reasons=[]),
    *done("export_model"), *done("register_model", decision="promoted", version=3),
    *done("finish"), over(),
]  # fmt: skip
GATE_REFUSED = [
    *done("evaluate_model"),
    *done("check_gate", decision="refused", reasons=["accuracy 0.5 is below 0.95"]),
    skip, *done("finish"), over(),
]  # fmt: skip
UNCHANGED = [
    *done("resolve_config", decision="unchanged", reasons=["those of digits-1"]),
    skip, *done("finish"), over(),
]  # fmt: skip
TRAINED = [
    *done("resolve_config"),
    *done("train_model", decision="trained", reasons=["after_training is stop"]),
    skip, *done("finish"), over(),
]  # fmt: skip
REGISTRY_REFUSED = [
    *done("evaluate_model"),
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


@pytest.fixture(params=["api", "api, a day later", "page, a day later"])
def waits(request, instance, remote):
    """Return a function that waits for a run, with or without pods, through the API or the UI."""
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
    """Return a function that waits for a run through the API's address, with the run's pods."""

    def wait(play):
        instance.store.play = [*play]
        return remote("submit", "--wait", "--json")

    return wait


def test_blessed_is_0_with_metrics_and_places(waits):
    answer = waits(BLESSED)
    assert (answer.code, answer.json["status"]) == (0, "blessed"), answer.err
    assert answer.json["metrics"] == {"accuracy": 0.97}
    assert (answer.json["global_step"], answer.json["handed_on_step"]) == (1500, 1000)


@pytest.mark.parametrize(
    ("play", "code", "status", "message"),
    [
        (GATE_REFUSED, 3, "refused", "accuracy 0.5 is below 0.95"),
        (REGISTRY_REFUSED, 3, "refused", "the champion has changed"),
        (UNCHANGED, 0, "unchanged", "those of digits-1"),
        (TRAINED, 0, "trained", "after_training is stop"),
        (failed("train_model", NAN), 1, "failed", f"train_model: {NAN}"),
        (CANCELLED, 130, "canceled", "the run was cancelled"),
    ],
)
def test_each_other_end_has_its_code_and_its_cause(waits, play, code, status, message):
    answer = waits(play)
    assert (answer.code, answer.json["status"]) == (code, status), answer.err
    assert answer.json["message"] == message


def test_a_step_that_was_killed_or_has_failed_is_1_after_the_exit_step(waited):
    answer = waited(failed("train_model", message="main: OOMKilled (exit code 137)"))
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"] == (
        "train_model: its pod failed (main: OOMKilled (exit code 137)): "
        "it ran out of memory: upload with more --memory"
    )
    # The failed step is not taken for the end, because the exit step has not run yet.
    answer = waited(failed("train_model", NAN))
    assert any(line.startswith("finish done") for line in answer.err.splitlines())


@pytest.mark.parametrize("has_ui", [False, True])
def test_it_is_the_same_for_a_person_who_looks_later(instance, remote, has_ui):
    instance.has_ui = has_ui
    instance.store.play = [*BLESSED]
    answer = remote("submit", "--wait")
    assert answer.code == 0
    [(run_id, workflow)] = instance.store.workflows.items()
    assert f"{run_id}: accuracy 0.9700; blessed" in answer.err
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
    lines = [line.split()[:3] for line in answer.err.splitlines()]
    assert ["evaluate_model", "evaluate_model", "done"] in lines


@pytest.fixture
def inside(instance, monkeypatch):
    instance.store.pipeline_root = INSIDE
    monkeypatch.setattr("flotilla.pipelines.runs.kfp_outcome.STORE_SECONDS", 0.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("play", "code", "status", "message"),
    [
        (BLESSED, 1, "unknown",
         "the run has finished, but the decision of the registry cannot be read: "),
        (GATE_REFUSED, 3, "refused", "the gate refused the model; "),
        (UNCHANGED, 1, "unknown",
         "the run has finished, but the reason why it did not train cannot be read: "),
        (failed("train_model", NAN), 1, "failed",
         "train_model: its pod failed (main: Error (exit code 1)); "),
    ],
)  # fmt: skip
def test_without_the_store_it_says_what_it_knows(waited, play, code, status, message):
    answer = waited(play)
    assert (answer.code, answer.json["status"]) == (code, status)
    assert answer.json["message"].startswith(
        f"{message}this machine cannot read the run's metrics below {INSIDE}/flotilla/"
        f"{answer.json['run_id']}: "
    )


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("is_shared", "status", "metrics"),
    [(False, "blessed", {"accuracy": 0.97}), (True, "unknown", {})],
)
def test_the_user_interface_of_one_user_reads_the_store_for_this_machine(
    instance, waited, is_shared, status, metrics
):
    def share(_workflow, _run):
        instance.has_ui, instance.multi_user = True, is_shared

    instance.has_ui = not is_shared
    answer = waited([share, *BLESSED])
    assert (answer.code, answer.json["status"]) == (int(is_shared), status), answer.err
    assert answer.json["metrics"] == metrics


@pytest.mark.parametrize("has_nodes", [False, True])
def test_the_records_below_the_configured_root_are_read(instance, remote, tmp_path, has_nodes):
    root = (tmp_path / "mine").as_uri()
    instance.has_v1beta1, instance.store.pipeline_root = has_nodes, INSIDE
    instance.store.play = [*BLESSED]
    answer = remote("submit", "--wait", "--json", "--set", f"storage.root={root}")
    assert (answer.code, answer.json["status"]) == (0, "blessed"), answer.err
    assert answer.json["metrics"] == {"accuracy": 0.97}
    assert storage.names(storage.join(root, answer.json["run_id"], "steps"))


@pytest.fixture
def no_waiting(monkeypatch):
    for name in ("START_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(f"flotilla.pipelines.runs.kfp_watch.{name}", 0.0)


PULL = f'ImagePullBackOff: Back-off pulling image "{IMAGE}"'
NO_NODE = "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."


def waiting(message, step="prepare_data"):
    def happen(workflow, run):
        run["state"] = "RUNNING"
        workflow.wait(step, message)

    return happen


@pytest.mark.usefixtures("no_waiting")
def test_an_image_that_does_not_exist_is_1_with_step_and_image(instance, waits):
    answer = waits([waiting(PULL)])
    assert (answer.code, answer.json["status"]) == (1, "failed")
    said = answer.json["message"]
    assert said.startswith(f"prepare_data: the image {IMAGE} cannot be pulled ({PULL}): pass")
    run_id = answer.json["run_id"]
    assert said.endswith(f"cancel it: flotilla cancel {run_id} --endpoint {instance.url}")
    assert not instance.asked(":terminate")


@pytest.fixture
def no_pause(monkeypatch):
    for name in ("LOST_SECONDS", "LOSS_SECONDS"):
        monkeypatch.setattr(f"flotilla.pipelines.runs.kfp_watch.{name}", 0.0)


def collected(workflow, _run):
    workflow.collect()


LOST = "if this run does not end within minutes, the Workflow and the pods of the run were deleted"


@pytest.mark.parametrize(
    "lost",
    [[begin("train_model"), collected], [*done("resolve_config"), *done("train_model"), collected]],
    ids=["with a running pod", "between two steps"],
)
@pytest.mark.parametrize("has_ui", [False, True], ids=["api", "page"])
@pytest.mark.usefixtures("no_pause")
def test_a_run_without_its_workflow_is_not_waited_for(instance, waited, lost, has_ui):
    instance.has_ui = has_ui
    answer = waited(lost)
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"].startswith(LOST)


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        (NO_NODE, True),
        ('pods "p" is forbidden: exceeded quota: small, requested: cpu=1', False),
    ],
)
@pytest.mark.usefixtures("no_pause")
def test_a_waiting_pod_that_was_created_must_exist(instance, waited, message, is_lost):
    instance.has_ui = True
    answer = waited([waiting(message), collected, collected, over("FAILED")])
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"].startswith(LOST) is is_lost


@pytest.mark.usefixtures("no_pause")
def test_pods_that_were_never_seen_are_not_lost(instance, waited):
    instance.has_logs = False
    answer = waited([*[begin("train_model")] * 3, over("FAILED")])
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert LOST not in answer.json["message"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        # An image may appear within a minute.
        ((PULL, "ErrImagePull: not found"), "cannot be pulled"),
        ((NO_NODE, NO_NODE), f"its pod is waiting ({NO_NODE}): no node has enough capacity"),
    ],
)
def test_a_pod_that_waits_is_one_line(instance, remote, messages, said):
    def starts(workflow, _run):
        workflow.end("resolve_config")

    instance.store.play = [*map(waiting, messages), starts, *BLESSED]
    answer = remote("submit", "--wait")
    assert answer.code == 0, answer.err
    assert answer.err.count(said) == 1


def test_a_name_of_an_image_that_is_none_is_reported_at_once(instance, remote):
    instance.store.play = [waiting("InvalidImageName: couldn't parse image name")]
    assert remote("submit", "--wait").code == 1
    assert len(instance.asked("GET .*v2beta1/runs/")) == 1


def test_status_says_what_a_run_waits_for(instance, remote):
    instance.store.play = [waiting(PULL)]
    remote("submit")
    [run_id] = instance.store.runs
    answer = remote("status", run_id, "--json")
    assert (answer.code, answer.json["status"]) == (0, "running")
    assert f"the image {IMAGE} cannot be pulled" in answer.err


NO_ACCOUNT = (
    'pods "flotilla-training-x7z2p-system-dag-driver-1" is forbidden: error looking up service '
    'account kubeflow/nobody: serviceaccount "nobody" not found'
)


def test_a_service_account_that_is_not_there(waited):
    def refused(workflow, run):
        run["state"] = "RUNNING"
        workflow.fail_driver("root", NO_ACCOUNT)

    answer = waited([refused, over("FAILED")])
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"] == (
        f"the run: its KFP driver failed ({NO_ACCOUNT}): create the service account, or pass an "
        "existing one with --service-account"
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
        "train_model: its KFP driver failed (main: Error (exit code "
        f"1){more if has_logs else ''}): check the service account, the pipeline root and its "
        "credentials, and the settings of the pods, such as `flotilla upload --cpu`"
    )


@pytest.mark.usefixtures("no_waiting")
def test_a_run_that_kfp_calls_running_for_ever(instance, remote):
    instance.store.play = [driver_failed]
    answer = remote("submit", "--wait", "--json")
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.json["message"].startswith("train_model: its KFP driver failed (")
    said = "no pod of the run has started since then; the run continues; to cancel it: "
    assert said in answer.json["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_waiting")
def test_a_pod_that_was_lost_is_awaited_until_kfp_makes_it_again(waits):
    def lose(workflow, run):
        run["state"] = "RUNNING"
        workflow.lose_pod("train_model")

    def again(workflow, _run):
        workflow.try_again("train_model")

    answer = waits([begin("train_model"), lose, again, *BLESSED[7:]])
    assert (answer.code, answer.json["status"]) == (0, "blessed")


def pod(message, state="FAILED", **more):
    values = {"name": "p", "step": "train_model", "is_driver": False, "image": "host/a:1", **more}
    return Pod(state=state, message=message, **values)


# These are messages of the kubelet, Argo 4.0.5 and Kubernetes.
@pytest.mark.parametrize(
    ("message", "words", "blocks"),
    [
        ("ImagePullBackOff: Back-off pulling", "the image host/a:1 cannot be pulled", True),
        ("ErrImagePull: failed to resolve", "the image host/a:1 cannot be pulled", True),
        ("InvalidImageName: Failed to apply", "the image host/a:1 cannot be pulled", True),
        ("Pod failed before main container starts due to ErrImagePull: x",
         "the image host/a:1 cannot be pulled", True),
        ('CreateContainerConfigError: secret "x" not found', "create the secret", True),
        ("Unschedulable: 0/3 nodes are available", "no node has enough capacity", False),
        ('Unschedulable: 0/3 nodes are available: persistentvolumeclaim "official" not found.',
         "create the claim in the namespace of the steps", True),
        ("Unschedulable: 0/3 nodes are available: pod has unbound immediate "
         "PersistentVolumeClaims.", "its persistent volume claim has no volume", True),
        ('Usage of EmptyDir volume "scratch" exceeds the limit "50Gi".',
         "upload with a larger --scratch", False),
        ("is forbidden: exceeded quota: compute", "a larger quota", False),
        ("main: OOMKilled (exit code 137)", "upload with more --memory", False),
        ("Pod was active on the node longer than the specified deadline",
         "it exceeded the deadline of the step", False),
        ("PodInitializing", "", False),
    ],
)  # fmt: skip
def test_each_message_has_its_remedy(message, words, blocks):
    line = explain_pod(pod(message))
    assert line.startswith("train_model: ")
    assert message in line
    assert words in line
    assert bool((found := explain_message(message)) and found.blocks) is blocks


@pytest.mark.parametrize(
    ("failed_pod", "more", "line"),
    [
        (pod("Unschedulable: 0/3 nodes", "PENDING"), "",
         "train_model: its pod is waiting (Unschedulable: 0/3 nodes)"),
        (pod(""), "", "train_model: its pod failed (KFP gives no more details)"),
        # A driver of the run is no step.
        (pod("main: Error (exit code 1)", step="", is_driver=True, image=""), "bad key",
         "the run: its KFP driver failed (main: Error (exit code 1); bad key): check the"),
    ],
)  # fmt: skip
def test_a_pod_that_waits_or_a_driver_or_a_pod_without_words(failed_pod, more, line):
    assert explain_pod(failed_pod, more).startswith(line)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("code", [1, 2])
def test_the_cause_of_a_step_without_a_record_is_the_message_of_its_pod(waited, code):
    words = "prepare_data: s3://b: missing or wrong credentials: set AWS_ACCESS_KEY_ID"
    message = f"main: Error (exit code {code}): {words}"
    answer = waited(failed("prepare_data", message=message))
    assert (answer.code, answer.json["message"]) == (code, words)
