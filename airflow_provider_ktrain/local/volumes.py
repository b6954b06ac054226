"""Volumes as directories: materialised below the pod's own directory, to which mount paths are rewritten."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj, Store

Rewrite = Callable[[str], str]
Token = Callable[[str, str], str]  # (namespace, service account) -> token
LOOPBACK = "127.0.0.1"
OUTSIDE = ("/dev/shm",)  # mount paths that the machine has as well, and that programs reach without naming them


class MountError(Exception):
    """A volume that cannot be set up; worded as the kubelet's FailedMount event words it."""

    def __init__(self, volume: str, why: str) -> None:
        super().__init__(f'MountVolume.SetUp failed for volume "{volume}" : {why}')


def decoded(obj: Obj) -> dict[str, bytes]:
    """What a ConfigMap or Secret holds, by key."""
    if obj["kind"] == "Secret":
        return {k: base64.b64decode(v) for k, v in (obj.get("data") or {}).items()}
    return {
        **{k: v.encode(errors="surrogateescape") for k, v in (obj.get("data") or {}).items()},
        **{k: base64.b64decode(v) for k, v in (obj.get("binaryData") or {}).items()},
    }


def field(pod: Obj, path: str) -> str:
    """A fieldRef: metadata.name, metadata.labels['x'], spec.nodeName, status.podIP, ... The pod's IP is loopback."""
    if path in ("status.podIP", "status.podIPs", "status.hostIP", "status.hostIPs"):
        return LOOPBACK
    head, _, key = path.partition("['")
    value: object = pod
    for part in head.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if key:
        value = value.get(key.removesuffix("']")) if isinstance(value, dict) else None
    elif isinstance(value, dict):
        return "\n".join(f'{k}="{v}"' for k, v in sorted(value.items()))
    return "" if value is None else str(value)


class Volumes:
    """A pod's volumes below `directory`. Mount paths in scripts (files that begin with `#!`) are rewritten too."""

    def __init__(self, store: Store, pod: Obj, directory: Path, token: Token | None = None) -> None:
        self._store = store
        self._pod = pod
        self._directory = directory
        self._token = token
        self._volumes = {v["name"]: v for v in pod["spec"].get("volumes") or ()}

    def mounts(self, container: Obj) -> dict[str, Path]:
        """Where each mount path of a container is."""
        return {
            m["mountPath"]: self._path(self._volumes[m["name"]]) / m.get("subPath", "")
            for m in container.get("volumeMounts") or ()
            if m["mountPath"].rstrip("/") not in OUTSIDE and m["name"] in self._volumes
        }

    def _path(self, volume: Obj) -> Path:
        """Where a volume is. A hostPath of no type that this machine has not is an empty directory."""
        host = volume.get("hostPath")
        if host and (host.get("type") or Path(host["path"]).exists()):
            return Path(host["path"])
        name: str = volume["name"]
        return self._directory / name

    def set_up(self) -> None:
        """Make or refresh all volumes; MountError names the first that cannot be."""
        for volume in self._volumes.values():
            path = self._path(volume)
            if volume.get("hostPath", {}).get("type"):
                self._host_path(volume, path)
            if "hostPath" in volume and self._directory not in path.parents:
                continue
            path.mkdir(parents=True, exist_ok=True)
            files = {}
            for source in self._sources(volume):
                files.update(source)
            _write_all(path, files, self._rewrite)

    @property
    def watched(self) -> set[tuple[Resource, str]]:
        """The ConfigMaps and Secrets that these volumes show."""
        found: set[tuple[Resource, str]] = set()
        for volume in self._volumes.values():
            for source in volume.get("projected", {}).get("sources") or (volume,):
                if "configMap" in source:
                    found.add((r.CONFIG_MAP, source["configMap"].get("name", "")))
                if "secret" in source:
                    found.add((r.SECRET, source["secret"].get("secretName") or source["secret"].get("name", "")))
        return found

    @staticmethod
    def _host_path(volume: Obj, path: Path) -> None:
        kind = volume["hostPath"]["type"]
        try:
            if kind == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            elif kind == "FileOrCreate":
                path.touch(exist_ok=True)
        except OSError as error:
            raise MountError(volume["name"], str(error)) from None
        wrong = (kind == "Directory" and not path.is_dir()) or (kind == "File" and not path.is_file())
        if wrong:
            what = {"Directory": "a directory", "File": "a file"}[kind]
            raise MountError(volume["name"], f"hostPath type check failed: {path} is not {what}")

    def _rewrite(self, text: str) -> str:
        """Mount paths of all containers in a script, such as /opt/kube in the kubexec.sh of an MPIJob."""
        spec = self._pod["spec"]
        for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
            for prefix, path in self.mounts(container).items():
                text = text.replace(prefix.rstrip("/") + "/", f"{path}/")
        return text

    def _sources(self, volume: Obj) -> list[dict[str, tuple[bytes, int]]]:
        name = volume["name"]
        projected = volume.get("projected")
        if not projected:
            return [
                self._files(name, volume, (volume.get("configMap") or volume.get("secret") or {}).get("defaultMode"))
            ]
        return [self._files(name, source, projected.get("defaultMode")) for source in projected.get("sources") or ()]

    def _files(self, volume: str, source: Obj, mode: int | None) -> dict[str, tuple[bytes, int]]:
        """The files of one source: path below the volume -> content and mode."""
        mode = 0o644 if mode is None else mode
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items") or ()
            return {i["path"]: (self._field(i), i.get("mode", mode)) for i in items if "fieldRef" in i}
        if "serviceAccountToken" in source:
            account = self._pod["spec"].get("serviceAccountName", "default")
            token = self._token(self._pod["metadata"]["namespace"], account) if self._token else ""
            return {source["serviceAccountToken"]["path"]: (token.encode(), mode)}
        for key, resource in (("configMap", r.CONFIG_MAP), ("secret", r.SECRET)):
            if key in source:
                return self._object_files(volume, resource, source[key], mode)
        return {}

    def _field(self, item: Obj) -> bytes:
        return field(self._pod, item["fieldRef"]["fieldPath"]).encode()

    def _object_files(self, volume: str, resource: Resource, ref: Obj, mode: int) -> dict[str, tuple[bytes, int]]:
        name, namespace = ref.get("secretName") or ref.get("name", ""), self._pod["metadata"]["namespace"]
        obj = self._store.find(resource, namespace, name)
        if obj is None:
            if (
                ref.get("optional") or name == "kube-root-ca.crt"
            ):  # that one is published with a delay, and then not needed
                return {}
            raise MountError(volume, f'{resource.singular} "{name}" not found')
        data = decoded(obj)
        if not ref.get("items"):
            return {key: (content, mode) for key, content in data.items()}
        missing = [i["key"] for i in ref["items"] if i["key"] not in data]
        if missing and not ref.get("optional"):
            raise MountError(volume, f"references non-existent {resource.singular} key: {missing[0]}")
        return {i["path"]: (data[i["key"]], i.get("mode", mode)) for i in ref["items"] if i["key"] in data}


def _write_all(directory: Path, files: dict[str, tuple[bytes, int]], rewrite: Rewrite) -> None:
    """Each file in one step, so that readers see the old content or the new."""
    for relative, (content, mode) in files.items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith(b"#!"):
            content = rewrite(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == content:
                continue
        draft = path.with_name(f".{path.name}.new")
        draft.write_bytes(content)
        draft.chmod(mode)
        os.replace(draft, path)
