"""Hypothesis strategies for every TFJob setting that the configuration allows."""

from hypothesis import strategies as st

names = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\Z")
keys = st.from_regex(r"\A([a-z]{1,5}\.[a-z]{1,5}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,9}[A-Za-z0-9])?\Z")
label_texts = st.from_regex(r"\A([A-Za-z0-9]([A-Za-z0-9._-]{0,9}[A-Za-z0-9])?)?\Z")
variables = st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,9}\Z").filter(
    lambda name: not name.startswith(("TF_CONFIG", "FLOTILLA_"))
)
quantities = st.sampled_from(["1", "500m", "2Gi", "1.5", 4, 0.5, "100k"])
# The configuration rejects two opening braces, which begin a placeholder in KFP and Argo.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12).filter(
    lambda text: "{{" not in text
)


def mapping(of_keys, values):
    return st.dictionaries(of_keys, values, max_size=2)


tolerations = st.sampled_from(
    [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists"}]
)
affinities = st.sampled_from(
    [{}, {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}]
)
volumes = st.builds(
    lambda name, read_only: {
        "name": name,
        "mount_path": f"/mnt/{name}",
        "source": {"persistentVolumeClaim": {"claimName": name}},
        "read_only": read_only,
    },
    st.sampled_from(["data", "models"]),
    st.booleans(),
)


def pods():
    return st.fixed_dictionaries(
        {},
        optional={
            "image": st.from_regex(r"\A[a-z]{1,9}(:[a-z0-9]{1,5})?\Z"),
            "image_pull_policy": st.sampled_from(["", "Always", "Never"]),
            "image_pull_secrets": st.lists(names, max_size=2),
            "command": st.lists(texts.filter(bool), max_size=3),
            "resources": st.fixed_dictionaries(
                {"requests": mapping(keys, quantities), "limits": mapping(keys, quantities)}
            ),
            "node_selector": mapping(keys, label_texts),
            "tolerations": st.lists(tolerations, max_size=2),
            "affinity": affinities,
            "priority_class": names,
            "scheduler": names,
            "labels": mapping(keys, label_texts),
            "annotations": mapping(keys, texts),
            "service_account": names,
            "volumes": st.lists(volumes, max_size=2, unique_by=lambda volume: volume["name"]),
            "shared_memory": st.sampled_from(["", "2Gi"]),
            "scratch": st.sampled_from(["", "50Gi"]),
            "working_folder": st.sampled_from(["", "/scratch/flotilla"]),
            "env": mapping(variables.map(lambda name: f"A{name}"), texts),
            "env_from_secrets": st.lists(names, max_size=2),
            "env_from_config_maps": st.lists(names, max_size=2),
            "secret_env": mapping(variables.map(lambda name: f"S{name}"), st.just("store/key")),
            "security": st.sampled_from(["", "restricted", "writable", "image"]),
            "security_context": st.sampled_from([{}, {"fsGroup": 2000, "runAsUser": 1234}]),
            "restart_policy": st.sampled_from(["", "ExitCode", "OnFailure", "Never"]),
            "grace_seconds": st.integers(0, 600),
        },
    )


jobs = st.fixed_dictionaries(
    {},
    optional={
        "clean_pod_policy": st.sampled_from(["Running", "All", "None"]),
        "ttl_seconds": st.integers(0, 10**6),
        "active_deadline_seconds": st.integers(1, 10**6),
        "backoff_limit": st.none() | st.integers(0, 100),
        "queue_name": st.just("") | names,
        "suspend": st.booleans(),
        "labels": mapping(keys, label_texts),
        "annotations": mapping(keys, texts),
        "scheduling": st.fixed_dictionaries(
            {
                "gang": st.booleans(),
                "min_available": st.integers(0, 9),
                "queue": names,
                "priority_class": names,
                "timeout_seconds": st.integers(0, 600),
            }
        ),
    },
)
kubernetes = st.fixed_dictionaries(
    {},
    optional={
        "namespace": names,
        "gpu_resource": st.sampled_from(["nvidia.com/gpu", "amd.com/gpu"]),
        "chiefless": st.booleans(),
        "job": jobs,
        **dict.fromkeys(("pod", "chief", "ps", "worker", "evaluator"), pods()),
    },
)
configurations = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"\A[a-z0-9]([a-z0-9._-]{0,48}[a-z0-9])?\Z"),
        "model": st.fixed_dictionaries({"args": mapping(texts, texts)}),
        "training": st.fixed_dictionaries(
            {
                "strategy": st.sampled_from(
                    ["single", "async_parameter_server", "multi_worker_mirrored", "my.own:One"]
                )
            }
        ),
        "cluster": st.fixed_dictionaries(
            {
                "parameter_servers": st.integers(1, 3),
                "workers": st.integers(1, 8),
                "gpus_per_worker": st.integers(0, 2),
                "kubernetes": kubernetes,
            }
        ),
    }
)
