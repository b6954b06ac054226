"""Volumes. They are created as directories below the pod's directory, and mount paths are rewritten to them."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.pods import containers
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store
from ktrain_embedded.ports import LOOPBACK

Files = dict[str, tuple[bytes, int]]  # path below the volume -> content and mode
Token = Callable[[str, str, str], str]  # (namespace, service account, audience or "") -> token
MODE = 0o644  # default mode of files
OBJECTS = {"configMap": r.CONFIG_MAP, "secret": r.SECRET}  # volume types that contain an object
NOT_RELOCATED = ("/dev/shm",)  # mount paths that also exist on this machine, and that libraries use implicitly


class MountError(Exception):
    """A volume cannot be set up. The message is that of the kubelet's FailedMount event."""

    def __init__(self, volume: str, why: str) -> None:
        super().__init__(f'MountVolume.SetUp failed for volume "{volume}" : {why}')


def decoded(obj: Obj) -> dict[str, bytes]:
    """The decoded data of a ConfigMap or Secret by key."""
    if obj["kind"] == "Secret":
        return {k: base64.b64decode(v) for k, v in (obj.get("data") or {}).items()}
    return {
        **{k: v.encode(errors="surrogateescape") for k, v in (obj.get("data") or {}).items()},
        **{k: base64.b64decode(v) for k, v in (obj.get("binaryData") or {}).items()},
    }


def field(pod: Obj, path: str) -> str:
    """The value of a fieldRef, such as metadata.name, metadata.labels['x'] or status.podIP. All IPs are loopback."""
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
    """A pod's volumes below `directory`. Mount paths in scripts (files that begin with `#!`) are also rewritten."""

    def __init__(self, store: Store, pod: Obj, directory: Path, token: Token | None = None) -> None:
        self._store = store
        self._pod = pod
        self._directory = directory
        self._token = token
        self._volumes = {v["name"]: v for v in pod["spec"].get("volumes") or ()}

    def mounts(self, container: Obj) -> dict[str, Path]:
        """The directory on this machine for each mount path of a container."""
        return {
            m["mountPath"]: self._path(self._volumes[m["name"]]) / m.get("subPath", "")
            for m in container.get("volumeMounts") or ()
            if m["mountPath"].rstrip("/") not in NOT_RELOCATED and m["name"] in self._volumes
        }

    def _path(self, volume: Obj) -> Path:
        """The directory of a volume. A hostPath without a type that doesn't exist here is an empty directory."""
        host = self._claimed(volume) or volume.get("hostPath")
        if host and (host.get("type") or Path(host["path"]).exists()):
            return Path(host["path"])
        return self._directory / str(volume["name"])

    def _claimed(self, volume: Obj) -> Obj | None:
        """The hostPath of the PersistentVolume that a volume's claim is bound to."""
        name = volume.get("persistentVolumeClaim", {}).get("claimName")
        claim = self._store.find(r.CLAIM, self._pod["metadata"]["namespace"], name) if name else None
        bound = self._store.find(r.VOLUME, None, claim["spec"].get("volumeName", "")) if claim else None
        found: Obj | None = bound["spec"].get("hostPath") if bound else None
        return found

    def set_up(self) -> None:
        """Create or update all volumes. MountError names the first volume that cannot be set up."""
        for volume in self._volumes.values():
            path = self._path(volume)
            if kind := volume.get("hostPath", {}).get("type"):
                _check(volume["name"], path, kind)
            if self._directory in path.parents:
                path.mkdir(parents=True, exist_ok=True)
                self._write_all(path, self._files(volume))

    @property
    def watched(self) -> set[tuple[Resource, str]]:
        """The ConfigMaps and Secrets in these volumes."""
        sources = (source for volume in self._volumes.values() for source in _sources(volume))
        return {(OBJECTS[kind], _name(ref)) for kind, ref in sources if kind in OBJECTS}

    def _rewrite(self, text: str) -> str:
        """Rewrite the mount paths of all containers in a script, such as /opt/kube in the kubexec.sh of an MPIJob."""
        for container in containers(self._pod["spec"]):
            for prefix, path in self.mounts(container).items():
                text = text.replace(prefix.rstrip("/") + "/", f"{path}/")
        return text

    def _files(self, volume: Obj) -> Files:
        files: Files = {}
        for kind, ref in _sources(volume):
            mode = (volume.get("projected") or ref).get("defaultMode", MODE)
            if kind == "downwardAPI":
                for item in ref.get("items") or ():
                    if "fieldRef" in item:
                        content = field(self._pod, item["fieldRef"]["fieldPath"]).encode()
                        files[item["path"]] = content, item.get("mode", mode)
            elif kind == "serviceAccountToken":
                account = self._pod["spec"].get("serviceAccountName", "default")
                namespace, audience = self._pod["metadata"]["namespace"], ref.get("audience", "")
                token = self._token(namespace, account, audience) if self._token else ""
                files[ref["path"]] = token.encode(), mode
            else:
                files |= self._object_files(volume["name"], OBJECTS[kind], ref, mode)
        for path in files:
            parts = PurePosixPath(path).parts
            if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
                raise MountError(volume["name"], f"{path!r} is no path of a file within it")
        return files

    def _object_files(self, volume: str, resource: Resource, ref: Obj, mode: int) -> Files:
        name = _name(ref)
        obj = self._store.find(resource, self._pod["metadata"]["namespace"], name)
        if obj is None:
            if ref.get("optional") or name == "kube-root-ca.crt":  # created with a delay, and not needed
                return {}
            raise MountError(volume, f'{resource.singular} "{name}" not found')
        data = decoded(obj)
        items = ref.get("items") or [{"key": key, "path": key} for key in data]
        missing = [i["key"] for i in items if i["key"] not in data]
        if missing and not ref.get("optional"):
            raise MountError(volume, f"references non-existent {resource.singular} key: {missing[0]}")
        return {i["path"]: (data[i["key"]], i.get("mode", mode)) for i in items if i["key"] in data}

    def _write_all(self, directory: Path, files: Files) -> None:
        """Write the files, each atomically: readers see either the old or the new content."""
        for relative, (content, mode) in files.items():
            path = directory / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            if content.startswith(b"#!"):
                script = content.decode(errors="surrogateescape")
                content = self._rewrite(script).encode(errors="surrogateescape")
            if not path.exists() or path.read_bytes() != content:
                draft = path.with_name(f".{path.name}.new")
                draft.write_bytes(content)
                draft.chmod(mode)
                os.replace(draft, path)


def _sources(volume: Obj) -> Iterator[tuple[str, Obj]]:
    """Kind and reference of each source of a volume's files."""
    for source in (volume.get("projected") or {}).get("sources") or (volume,):
        for kind in (*OBJECTS, "downwardAPI", "serviceAccountToken"):
            if kind in source:
                yield kind, source[kind]


def _name(ref: Obj) -> str:
    return str(ref.get("secretName") or ref.get("name", ""))


def _check(volume: str, path: Path, kind: str) -> None:
    """Check a hostPath's type. Creates the directory for DirectoryOrCreate. MountError if the check fails."""
    if kind == "DirectoryOrCreate":
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
    wrong = "a directory" if kind.startswith("Directory") and not path.is_dir() else ""
    wrong = "a file" if kind.startswith("File") and not path.is_file() else wrong
    if wrong:
        raise MountError(volume, f"hostPath type check failed: {path} is not {wrong}")
