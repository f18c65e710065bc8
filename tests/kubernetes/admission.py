"""Pod Security admission: what the `restricted` standard rejects, with Kubernetes's messages.

Only the checks that a training pod can fail are implemented. The `baseline` standard is not
enforced.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Tree = dict[str, Any]
ENFORCE = "pod-security.kubernetes.io/enforce"
RESTRICTED = "restricted"
_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image",
    "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
_PROFILES = ("RuntimeDefault", "Localhost")


def refusal(pod: Tree, labels: Mapping[str, str]) -> str:
    """Return why a namespace with these labels rejects a pod; an empty string if it is accepted."""
    if labels.get(ENFORCE) != RESTRICTED:
        return ""
    found = [text for check in _CHECKS for text in check(pod["spec"])]
    name = pod["metadata"]["name"]
    violates = f'violates PodSecurity "{RESTRICTED}:latest"'
    return f'pods "{name}" is forbidden: {violates}: {", ".join(found)}' if found else ""


def _containers(spec: Tree) -> list[Tree]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def _named(containers: Iterable[Tree]) -> str:
    names = [each["name"] for each in containers]
    return f"container{'s' if len(names) > 1 else ''} {_quoted(names)}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _of(tree: Tree, *path: str) -> Any:
    node: Any = tree.get("securityContext") or {}
    for key in path:
        node = (node or {}).get(key)
    return node


def _escalation(spec: Tree) -> list[str]:
    bad = [c for c in _containers(spec) if _of(c, "allowPrivilegeEscalation") is not False]
    must = "must set securityContext.allowPrivilegeEscalation=false"
    return [f"allowPrivilegeEscalation != false ({_named(bad)} {must})"] if bad else []


def _capabilities(spec: Tree) -> list[str]:
    bad = [c for c in _containers(spec) if "ALL" not in (_of(c, "capabilities", "drop") or [])]
    must = 'must set securityContext.capabilities.drop=["ALL"]'
    return [f"unrestricted capabilities ({_named(bad)} {must})"] if bad else []


def _volumes(spec: Tree) -> list[str]:
    bad = [v for v in spec.get("volumes", []) if not _VOLUMES & set(v)]
    kinds = sorted({key for volume in bad for key in volume if key != "name"})
    several = "s" if len(bad) > 1 else ""
    volumes = f"volume{several} {_quoted(v['name'] for v in bad)} use{'' if several else 's'}"
    types = f"restricted volume type{'s' if len(kinds) > 1 else ''} {_quoted(kinds)}"
    return [f"restricted volume types ({volumes} {types})"] if bad else []


def _not_root(spec: Tree) -> list[str]:
    field = "runAsNonRoot"
    denied = [c for c in _containers(spec) if _of(c, field) is False]
    setters = ["pod"] * (_of(spec, field) is False) + [_named(denied)] * bool(denied)
    if setters:
        return [
            f"{field} != true ({' and '.join(setters)} must not set securityContext.{field}=false)"
        ]
    silent = [c for c in _containers(spec) if _of(c, field) is None and not _of(spec, field)]
    must = f"must set securityContext.{field}=true"
    return [f"{field} != true (pod or {_named(silent)} {must})"] if silent else []


def _user(spec: Tree) -> list[str]:
    bad = [c for c in _containers(spec) if _of(c, "runAsUser") == 0]
    setters = ["pod"] * (_of(spec, "runAsUser") == 0) + [_named(bad)] * bool(bad)
    return [f"runAsUser=0 ({' and '.join(setters)} must not set runAsUser=0)"] if setters else []


def _seccomp(spec: Tree) -> list[str]:
    whole = _of(spec, "seccompProfile", "type")
    kinds = {c["name"]: _of(c, "seccompProfile", "type") for c in _containers(spec)}
    wrong = [c for c in _containers(spec) if kinds[c["name"]] not in (None, *_PROFILES)]
    is_wrong = whole not in (None, *_PROFILES)
    setters = ["pod"] * is_wrong + [_named(wrong)] * bool(wrong)
    if setters:
        values = sorted({*(kinds[c["name"]] for c in wrong), *([whole] if is_wrong else [])})
        must = f"must not set securityContext.seccompProfile.type to {_quoted(values)}"
        return [f"seccompProfile ({' and '.join(setters)} {must})"]
    silent = [c for c in _containers(spec) if kinds[c["name"]] is None and whole is None]
    must = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
    return [f"seccompProfile (pod or {_named(silent)} {must})"] if silent else []


_CHECKS: tuple[Callable[[Tree], list[str]], ...] = (
    _escalation,
    _capabilities,
    _volumes,
    _not_root,
    _user,
    _seccomp,
)
