"""Tests which tasks each strategy needs and which task runs the outer loop."""

import json
import socket
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.topology import (
    ROLES,
    TOPOLOGIES,
    Cluster,
    Task,
    check_port,
    find_topology,
    from_flags,
    from_tf_config,
    leader,
)
from flotilla.trainer.runtime.errors import ConfigError, UserError

SERVED = {"ps": 2, "worker": 3, "chief": 1}
TASKS = {
    "single": {"chief": 1},
    "async_parameter_server": SERVED,
    "sync_parameter_server": SERVED,
    "in_graph": SERVED,
    "multi_worker_mirrored": {"worker": 3},
}
CHIEF, FIRST, SECOND = Task(role="chief", index=0), *(Task(role="worker", index=i) for i in (0, 1))
PS = Task(role="ps", index=0)


@pytest.mark.parametrize("strategy", [*TOPOLOGIES, "my.own:Strategy"])
def test_only_the_roles_that_a_strategy_uses_are_started_and_its_leaders_lead(strategy):
    topology = find_topology(strategy)
    tasks = topology.tasks(servers=2, workers=3)
    assert tasks == TASKS.get(strategy, SERVED)
    assert "chief" not in tasks or list(tasks)[-1] == "chief"
    started = [each for each in (CHIEF, PS, FIRST, SECOND) if each.role in tasks]
    leaders = [CHIEF] if "chief" in tasks else [FIRST, SECOND]
    assert [task for task in started if topology.leads(task)] == leaders


@pytest.mark.parametrize(
    ("addresses", "task"),
    [
        ({"chief": ("a:1",), "worker": ("a:2", "a:3")}, CHIEF),
        ({"chief": ("a:1",)}, CHIEF),
        ({"worker": ("a:2", "a:3")}, FIRST),
        ({"ps": ("a:1",), "worker": ("a:2",)}, FIRST),
    ],
)
def test_the_chief_publishes_or_worker_0_where_there_is_none(addresses, task):
    assert leader(Cluster(addresses=addresses)) == task


CLUSTER = {
    "chief": ["digits-chief-0.ns.svc:2222"],
    "ps": ["127.0.0.1:2001", "[::1]:2002"],
    "worker": ["w_0:1", "w-1.example:65535"],
}
GOOD = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
hosts = st.sampled_from(
    ["a:1", "a:2", "b:2222", "a", ":1", "a:0", "a:70000", "a:1\n", "é:1", "a:\u0661"]
)
roles = st.sampled_from([*ROLES, "worke", "master", "", "ps\n"])
clusters = st.dictionaries(roles, st.lists(hosts | json_values, max_size=3) | json_values)
tasks = st.fixed_dictionaries(
    {"type": roles | json_values},
    optional={
        "index": st.integers(-1, 3) | st.sampled_from(["0", "1", "\u0663", "9" * 9]) | json_values
    },
)
trees = st.fixed_dictionaries(
    {}, optional={"cluster": clusters | json_values, "task": tasks | json_values}
)


def config_of(**changes):
    return json.dumps({**GOOD, **changes})


def refused(text):
    with pytest.raises(ConfigError) as caught:
        from_tf_config(text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith("TF_CONFIG")
    return message


def test_a_cluster_and_its_task_and_a_copy_of_its_specification():
    cluster, task = from_tf_config(config_of(environment="cloud"))
    assert task == Task(role="worker", index=1)
    assert str(task) == "worker-1"
    assert cluster.spec() == CLUSTER
    assert [cluster.count(role) for role in ROLES] == [1, 2, 2, 0]
    assert cluster.address(task) == "w-1.example:65535"
    assert json.loads(cluster.tf_config(task)) == GOOD
    spec = Cluster(addresses={"ps": ("a:1",)}).spec()
    spec["ps"].append("b:1")
    assert Cluster(addresses={"ps": ("a:1",)}).spec() == {"ps": ["a:1"]}


def test_what_tf_config_may_leave_out():
    assert from_tf_config(config_of(task={"type": "chief"}))[1] == Task(role="chief", index=0)
    assert from_tf_config(config_of(task={"type": "ps", "index": "1"}))[1].index == 1
    cluster, _ = from_tf_config(config_of(cluster={"worker": ["a:1", "a:2"]}))
    assert (cluster.count("chief"), cluster.count("worker")) == (0, 2)


@pytest.mark.parametrize("index", [0, 1, 7])
def test_the_evaluator_is_no_part_of_the_cluster(index):
    given_cluster = {**CLUSTER, "evaluator": ["e:2222"]}
    task = {"type": "evaluator", "index": index}
    cluster, found = from_tf_config(config_of(cluster=given_cluster, task=task))
    assert found == Task(role="evaluator", index=index)
    assert cluster.spec() == CLUSTER
    worker, _ = from_tf_config(config_of(cluster=given_cluster))
    assert worker == cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "TF_CONFIG is not set; start the task with the launcher"),
        (" \n", "TF_CONFIG is not set"),
        ("{", "TF_CONFIG is not JSON: Expecting property name"),
        ("cluster: a", "TF_CONFIG is not JSON: "),
        ("9" * 5000, "TF_CONFIG is not JSON: Exceeds the limit"),
        ("[" * 100_000, "TF_CONFIG is not JSON: maximum recursion depth"),
        ("[]", "TF_CONFIG must be an object with 'cluster' and 'task'"),
        ("null", "TF_CONFIG must be an object"),
        ("{}", "TF_CONFIG: 'cluster' must map roles to lists of host:port"),
        (config_of(cluster={}), "TF_CONFIG: 'cluster' must map roles"),
        (config_of(cluster=["a:1"]), "TF_CONFIG: 'cluster' must map roles"),
        (config_of(cluster={"workers": []}),
         "TF_CONFIG: there is no role 'workers'; did you mean 'worker'"),
        (config_of(cluster={"x": []}),
         "TF_CONFIG: there is no role 'x' (one of chief, ps, worker, evaluat"),
        (config_of(cluster={"worker": "a:1"}), "TF_CONFIG: the tasks of 'worker' must be a lis"),
        (config_of(cluster={"worker": ["a"]}), "TF_CONFIG: 'a' of 'worker' is not host:port"),
        (config_of(cluster={"worker": [1]}), "TF_CONFIG: 1 of 'worker' is not host:port"),
        (config_of(cluster={"worker": ["a:0"]}), "TF_CONFIG: 'a:0' of 'worker' is not"),
        (config_of(cluster={"worker": ["a:65536"]}), "TF_CONFIG: 'a:65536' of 'worker' is not"),
        (config_of(cluster={"worker": ["a:1\n"]}), r"TF_CONFIG: 'a:1\n' of 'worker' is not"),
        (config_of(cluster={"worker": ["a:\u0661"]}),
         "TF_CONFIG: 'a:\u0661' of 'worker' is not host:port"),
        (config_of(cluster={"worker": ["grpc://a:1"]}), "TF_CONFIG: 'grpc://a:1' of 'worker'"),
        (config_of(cluster={"worker": ["a:1"], "ps": ["a:1"]}),
         "TF_CONFIG: a:1 is in the cluster twice"),
        (json.dumps({"cluster": CLUSTER}), "TF_CONFIG: 'task' must be an object with 'type'"),
        (config_of(task={"type": "work"}),
         "TF_CONFIG: there is no task type 'work'; did you mean 'worker'"),
        (config_of(task={"type": ["ps"]}), "TF_CONFIG: there is no task type ['ps']"),
        (config_of(task={}), "TF_CONFIG: there is no task type None"),
        (config_of(task={"type": "worker", "index": 2}), "TF_CONFIG: task worker-2 is not in the"),
        (config_of(task={"type": "ps", "index": -1}),
         "TF_CONFIG: task index -1 is not a whole number of at least 0"),
        (config_of(task={"type": "ps", "index": True}), "TF_CONFIG: task index True is not"),
        (config_of(task={"type": "ps", "index": 1.0}), "TF_CONFIG: task index 1.0 is not"),
        (config_of(task={"type": "ps", "index": "\u0663"}), "TF_CONFIG: task index '٣' is not"),
        (config_of(task={"type": "ps", "index": "9" * 5000}), "TF_CONFIG: task index '999"),
        (config_of(task={"type": "ps", "index": None}), "TF_CONFIG: task index None is not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(text, said):
    assert refused(text).startswith(said)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40) | (json_values | trees).map(json.dumps))
def test_any_text_is_a_cluster_or_one_line(text):
    try:
        cluster, task = from_tf_config(text)
    except ConfigError:
        refused(text)
        return
    assert set(cluster.spec()) <= {"chief", "ps", "worker"}
    assert task.role == "evaluator" or task.index < cluster.count(task.role)
    if task.role != "evaluator":
        assert from_tf_config(cluster.tf_config(task)) == (cluster, task)


HOSTS = {"chief": "", "ps": "127.0.0.1:2001,[::1]:2002", "worker": "w_0:1"}


def test_flags_say_the_same_as_tf_config():
    cluster, task = from_flags(HOSTS, "ps", 1)
    assert (cluster, task) == from_tf_config(cluster.tf_config(task))
    assert cluster.spec() == {"ps": ["127.0.0.1:2001", "[::1]:2002"], "worker": ["w_0:1"]}
    assert from_flags(HOSTS, "evaluator", 0) == (cluster, Task(role="evaluator", index=0))


@pytest.mark.parametrize(
    ("hosts", "role", "index", "said"),
    [
        ({}, "ps", 0, "the flags: 'cluster' must map roles"),
        (HOSTS, "", 0, "the flags: there is no task type '' (one of chief, ps, worker, evaluator)"),
        (HOSTS, "ps", -1, "the flags: task index -1 is not a whole number of at least 0"),
        (HOSTS, "chief", 0, "the flags: task chief-0 is not in the cluster"),
        ({**HOSTS, "worker": "a:1,"}, "ps", 0, "the flags: '' of 'worker' is not host:port"),
        ({**HOSTS, "worker": "a:1, b:1"}, "ps", 0, "the flags: ' b:1' of 'worker' is not host:po"),
        ({**HOSTS, "worker": "w:1,w:1"}, "ps", 0, "the flags: w:1 is in the cluster twice"),
    ],
)
def test_what_is_wrong_with_flags_is_said_in_one_line(hosts, role, index, said):
    with pytest.raises(ConfigError) as caught:
        from_flags(hosts, role, index)
    assert str(caught.value).startswith(said)
    assert len(str(caught.value).splitlines()) == 1


def one_task(port, host="127.0.0.1"):
    return Cluster(addresses={"ps": (f"{host}:{port}",)}), Task(role="ps", index=0)


def listening(family=socket.AF_INET, host="127.0.0.1"):
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, 0))
    server.listen()
    return closing(server)


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "")]
)
def test_a_port_on_which_someone_listens_is_refused(family, host):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with listening(family, host) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError) as caught:
            check_port(*one_task(port))
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"ps-0 cannot serve on 127.0.0.1:{port}: Address already in use; "
        "end the process that uses the port, or give the task another port"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "name.of.a.pod"])
def test_a_port_that_is_free_stays_so(host):
    with listening() as server:
        port = server.getsockname()[1]
    check_port(*one_task(port, host))
    check_port(*one_task(port, host))


def test_a_port_that_was_just_left_is_free():
    # Leftover connections must not block the port of a restarted task.
    with listening() as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    check_port(*one_task(port))
