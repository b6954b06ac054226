"""The environment, paths and command of a container's process.

A process here doesn't have its own root directory, network or host name. The differences from a real container are
rewritten when the process is executed. The API object isn't changed. These values are rewritten:

- paths of mounted volumes, the image's directory and the termination log, in command, args and environment
- rendezvous: MASTER_ADDR, MASTER_PORT and similar variables contain loopback and a port that is unique to the job
- services of the cluster that this process serves: their host and port
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ktrain_embedded.node.images import binaries
from ktrain_embedded.node.volumes import OBJECTS, decoded, field
from ktrain_embedded.objects import quantity
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store
from ktrain_embedded.ports import LOOPBACK, free_port

PORTS = range(10_000, 20_000)  # below the kernel's range of ephemeral ports
REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
PATH = re.compile(r"(?<![\w./$}~-])/(?!/)[^\s\"'`$;|&<>(){}\[\],:=*?!\\]+")
RENDEZVOUS = {
    "MASTER_ADDR": "{0}", "PET_MASTER_ADDR": "{0}", "MASTER_PORT": "{1}", "PET_MASTER_PORT": "{1}",
    "PET_RDZV_ENDPOINT": "{0}:{1}",
}  # fmt: skip
PATHS = "paths.json"  # name of the file with the paths of a container
INHERITED_VARIABLES = (
    "HOME",
    "LD_LIBRARY_PATH",
    "TMPDIR",
)  # variables copied from the environment of the cluster's process


class ConfigError(Exception):
    """The container cannot be created as configured. Usually a ConfigMap, a Secret or a key is missing."""

    def __init__(self, message: str, reason: str = "CreateContainerConfigError") -> None:
        super().__init__(message)
        self.reason = reason


class Ports:
    """Assigns one port to each job, shared by its pods. Two jobs that use port 23456 don't conflict on loopback."""

    def __init__(self) -> None:
        self._by_owner: dict[str, int] = {}

    def of(self, pod: Obj) -> int:
        """The port of the pod's controller, or of the pod itself if it doesn't have a controller."""
        owners = [o["uid"] for o in pod["metadata"].get("ownerReferences", ()) if o.get("controller")]
        owner = owners[0] if owners else pod["metadata"]["uid"]
        while owner not in self._by_owner:
            port = free_port(PORTS)
            if port not in self._by_owner.values():
                self._by_owner[owner] = port
        return self._by_owner[owner]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` if NAME is known, and `$$` by `$`. This is the expansion of Kubernetes, not of the shell."""
    return REFERENCE.sub(lambda m: "$" if m[1] is None else variables.get(m[1], m[0]), text)


@dataclass(frozen=True)
class Paths:
    """Maps paths in a container to paths on this machine: by `mounts` (prefixes), else to the image's directory."""

    mounts: Mapping[str, Path]
    image: Path

    def write(self, directory: Path) -> None:
        """Store the paths in the directory of a container, for commands that are executed in it later."""
        content = {"mounts": {prefix: str(path) for prefix, path in self.mounts.items()}, "image": str(self.image)}
        (directory / PATHS).write_text(json.dumps(content))

    @classmethod
    def read(cls, directory: Path) -> Paths:
        """Read what `write` has stored."""
        content = json.loads((directory / PATHS).read_text())
        return cls({prefix: Path(path) for prefix, path in content["mounts"].items()}, Path(content["image"]))

    def locate(self, path: str) -> str:
        """The path on this machine."""
        for prefix in sorted(self.mounts, key=len, reverse=True):
            if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
                return str(self.mounts[prefix]) + path[len(prefix.rstrip("/")) :]
        inside = self.image / path.lstrip("/")
        return str(inside) if path.strip("/") and inside.exists() else path

    def rewrite(self, text: str) -> str:
        """Replace all absolute paths in a text by their paths on this machine."""
        return PATH.sub(lambda m: self.locate(m[0]), text)


def declared(store: Store, pod: Obj, container: Obj, node: Obj) -> dict[str, str]:
    """The manifest's environment. The last duplicate wins. ConfigError if a referenced object or key is missing."""
    namespace = pod["metadata"]["namespace"]
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for resource, ref in _objects(source, "Ref"):
            data = _data(store, resource, namespace, ref)
            found |= {source.get("prefix", "") + key: value for key, value in data.items()}
    for entry in container.get("env", ()):
        name, source = entry["name"], entry.get("valueFrom", {})
        if "fieldRef" in source:
            found[name] = field(pod, source["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in source:
            found[name] = resource_field(container, node, source["resourceFieldRef"])
        elif not source:
            found[name] = expand(entry.get("value", ""), found)
        for resource, ref in _objects(source, "KeyRef"):
            data, key = _data(store, resource, namespace, ref), ref["key"]
            if key in data:
                found[name] = data[key]
            elif not ref.get("optional"):
                raise ConfigError(f"couldn't find key {key} in {resource.kind} {namespace}/{ref['name']}")
    return found


def _objects(source: Obj, kind: str) -> Iterator[tuple[Resource, Obj]]:
    """The ConfigMap or Secret that a source references, for example by configMapRef or configMapKeyRef."""
    for name, resource in OBJECTS.items():
        if f"{name}{kind}" in source:
            yield resource, {"name": "", **source[f"{name}{kind}"]}


def _data(store: Store, resource: Resource, namespace: str, ref: Obj) -> dict[str, str]:
    obj = store.find(resource, namespace, ref["name"])
    if obj is None and not ref.get("optional"):
        raise ConfigError(f'{resource.singular} "{ref["name"]}" not found')
    return {k: v.decode(errors="surrogateescape") for k, v in decoded(obj).items()} if obj else {}


def resource_field(container: Obj, node: Obj, ref: Obj) -> str:
    """The value of a resourceFieldRef: divided by the divisor, rounded up. An unset limit is the node's allocatable."""
    which, _, name = ref["resource"].partition(".")
    amount = (container.get("resources") or {}).get(which, {}).get(name)
    if amount is None:
        amount = node["status"]["allocatable"].get(name, 0) if which == "limits" else 0
    divisor = quantity.parse(ref.get("divisor") or 1) or 1
    return str(-int(-quantity.parse(amount) // divisor))


def on_this_machine(env: Mapping[str, str], port: int, hosts: Mapping[str, str]) -> dict[str, str]:
    """The environment for this machine: rendezvous variables contain loopback and the job's port.

    :param hosts: host:port of services, mapped to the host:port that replaces each.
    """
    here = {**env, **{name: template.format(LOOPBACK, port) for name, template in RENDEZVOUS.items() if name in env}}
    for host, address in hosts.items():
        here = {name: value.replace(host, address) for name, value in here.items()}
    if "PET_RDZV_ENDPOINT" in env:
        here["PET_LOCAL_ADDR"] = LOOPBACK
    if here.keys() & {"MASTER_ADDR", "PET_NNODES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        here |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), loopback)
    return here


def base(hostname: str, tools: Path, image: Path) -> dict[str, str]:
    """The variables of every container: HOSTNAME, HOME and PATH. PATH begins with tools, image and this Python."""
    path = [str(tools), *binaries(image), str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath]
    return {
        **{k: os.environ[k] for k in INHERITED_VARIABLES if k in os.environ},
        "PATH": ":".join(path),
        "HOSTNAME": hostname,
    }


def command(container: Obj, env: Mapping[str, str], rewrite: Callable[[str], str]) -> list[str]:
    """Return command and args as one list, with references expanded and paths rewritten."""
    return [rewrite(expand(a, env)) for a in (*(container.get("command") or ()), *(container.get("args") or ()))]
