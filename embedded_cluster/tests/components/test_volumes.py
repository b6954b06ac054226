"""Volumes as directories, and the paths that lead to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.small_cluster import small
from ktrain_embedded.node.environment import Paths, expand
from ktrain_embedded.node.volumes import MountError, Volumes
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store


def volumes(root: Path, store: Store, *declared: Obj, mounts: list[Obj] | None = None) -> Volumes:
    pod = {
        "metadata": {"name": "p", "namespace": "default", "labels": {"a": "1", "b": "2"}},
        "spec": {"containers": [{"name": "c", "volumeMounts": mounts or []}], "volumes": list(declared)},
    }
    return Volumes(store, pod, root, token=lambda namespace, account, _: f"token of {namespace}/{account}")


@pytest.fixture
def store() -> Store:
    store = Store()
    store.create(r.CONFIG_MAP, {
        "metadata": {"name": "c", "namespace": "default"}, "data": {"a": "A", "run.sh": "#!/bin/sh\n/etc/c/a /opt/x"},
        "binaryData": {"raw": "/w=="},
    })  # fmt: skip
    store.create(r.SECRET, {"metadata": {"name": "s", "namespace": "default"}, "data": {"key": "c2VjcmV0"}})
    return store


def test_config_maps_and_secrets_become_files(tmp_path: Path, store: Store) -> None:
    config = {"name": "v", "configMap": {"name": "c"}}
    items = [{"key": "key", "path": "deep/id_rsa", "mode": 0o400}]
    secret = {"name": "w", "secret": {"secretName": "s", "defaultMode": 0o600, "items": items}}
    volumes(tmp_path, store, config, secret).set_up()
    assert (tmp_path / "v" / "a").read_text() == "A"
    assert (tmp_path / "v" / "raw").read_bytes() == b"\xff"
    assert (tmp_path / "w" / "deep" / "id_rsa").read_text() == "secret"
    assert (tmp_path / "w" / "deep" / "id_rsa").stat().st_mode & 0o777 == 0o400


def test_mount_paths_in_scripts_are_rewritten(tmp_path: Path, store: Store) -> None:
    made = volumes(tmp_path, store, {"name": "v", "configMap": {"name": "c"}},
                   mounts=[{"name": "v", "mountPath": "/etc/c"}])  # fmt: skip
    made.set_up()
    assert (tmp_path / "v" / "run.sh").read_text() == f"#!/bin/sh\n{tmp_path}/v/a /opt/x"


def test_projected_sources_share_a_directory(tmp_path: Path, store: Store) -> None:
    field = {"fieldRef": {"fieldPath": "metadata.labels"}}
    sources: list[Obj] = [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": "c", "items": [{"key": "a", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "labels", **field}]}},
        {"secret": {"name": "s"}},
    ]
    volumes(tmp_path, store, {"name": "v", "projected": {"sources": sources}}).set_up()
    found = {p.name: p.read_text() for p in (tmp_path / "v").iterdir()}
    expected = {"token": "token of default/default", "ca.crt": "A", "labels": 'a="1"\nb="2"', "key": "secret"}
    assert found == expected


@pytest.mark.parametrize(
    ("volume", "why"),
    [
        ({"configMap": {"name": "no"}}, 'configmap "no" not found'),
        ({"secret": {"secretName": "no"}}, 'secret "no" not found'),
        ({"configMap": {"name": "c", "items": [{"key": "no", "path": "x"}]}},
         "references non-existent configmap key: no"),
        ({"configMap": {"name": "c", "items": [{"key": "a", "path": "../a"}]}},
         "'../a' is no path of a file within it"),
        ({"secret": {"secretName": "s", "items": [{"key": "key", "path": "/"}]}},
         "'/' is no path of a file within it"),
        ({"hostPath": {"path": "/no/such", "type": "Directory"}},
         "hostPath type check failed: /no/such is not a directory"),
    ],
)  # fmt: skip
def test_mount_errors_name_the_reason(tmp_path: Path, store: Store, volume: Obj, why: str) -> None:
    with pytest.raises(MountError) as raised:
        volumes(tmp_path, store, {"name": "v", **volume}).set_up()
    assert str(raised.value) == f'MountVolume.SetUp failed for volume "v" : {why}'


def test_optional_sources_may_be_missing(tmp_path: Path, store: Store) -> None:
    volumes(tmp_path, store, {"name": "v", "configMap": {"name": "no", "optional": True}}).set_up()
    assert list((tmp_path / "v").iterdir()) == []


def test_host_paths_and_shared_memory_are_not_relocated(tmp_path: Path, store: Store) -> None:
    host = {"name": "h", "hostPath": {"path": str(tmp_path / "data"), "type": "DirectoryOrCreate"}}
    memory = {"name": "m", "emptyDir": {"medium": "Memory"}}
    mounts = [{"name": "h", "mountPath": "/data", "subPath": "set"}, {"name": "m", "mountPath": "/dev/shm"}]
    made = volumes(tmp_path, store, host, memory, mounts=mounts)
    made.set_up()
    assert (tmp_path / "data").is_dir()
    assert made.mounts({"volumeMounts": mounts}) == {"/data": tmp_path / "data" / "set"}


def test_missing_host_path_is_an_empty_directory(tmp_path: Path, store: Store) -> None:
    mounts = [{"name": "h", "mountPath": "/data"}]
    made = volumes(tmp_path, store, {"name": "h", "hostPath": {"path": "/no/such/share"}}, mounts=mounts)
    made.set_up()
    assert made.mounts({"volumeMounts": mounts}) == {"/data": tmp_path / "h"}
    assert list((tmp_path / "h").iterdir()) == []


def test_a_claim_is_the_directory_of_its_volume(tmp_path: Path, store: Store) -> None:
    store.create(r.VOLUME, {"metadata": {"name": "pv"}, "spec": {"hostPath": {"path": str(tmp_path / "pv")}}})
    store.create(r.CLAIM, {"metadata": {"name": "data", "namespace": "default"}, "spec": {"volumeName": "pv"}})
    (tmp_path / "pv").mkdir()
    mounts = [{"name": "v", "mountPath": "/data"}]
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}
    made = volumes(tmp_path / "pod", store, volume, mounts=mounts)
    made.set_up()
    assert made.mounts({"volumeMounts": mounts}) == {"/data": tmp_path / "pv"}


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/etc/mpi/hostfile", "V/hostfile"),
        ("--hostfile=/etc/mpi/hostfile", "--hostfile=V/hostfile"),
        ("cat /etc/mpi/* && ls /etc/mpi; x='/etc/mpi'", "cat V/* && ls V; x='V'"),
        ("/etc/mpich/x:/etc/mpi/x", "/etc/mpich/x:V/x"),
        ("/x/etc/mpi/x ./etc/mpi/x https://host/etc/mpi/x", "/x/etc/mpi/x ./etc/mpi/x https://host/etc/mpi/x"),
        ("python /workspace/train.py", "python I/workspace/train.py"),
        ("/workspace/absent.py / // $HOME/etc/mpi", "/workspace/absent.py / // $HOME/etc/mpi"),
    ],
)
def test_paths_in_scripts_are_found(tmp_path: Path, text: str, rewritten: str) -> None:
    image, volume = tmp_path / "image", tmp_path / "volume"
    (image / "workspace").mkdir(parents=True)
    (image / "workspace" / "train.py").touch()
    paths = Paths({"/etc/mpi": volume}, image)
    assert paths.rewrite(text).replace(str(volume), "V").replace(str(image), "I") == rewritten


@given(st.text(alphabet="/ab .=:'$()", max_size=30))
def test_scripts_without_known_paths_are_unchanged(text: str) -> None:
    assert Paths({"/data": Path("/elsewhere")}, Path("/no/such/image")).rewrite(text) == text


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)", "1"), ("$(B)", "$(B)"), ("$$(A)", "$(A)"), ("$A ${A} $(A", "$A ${A} $(A"), ("$$$(A)", "$1")],
)
def test_references_are_expanded_as_kubernetes_does(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


async def test_changed_config_map_is_mounted_again(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        made = cluster.store.create(r.CONFIG_MAP, {
            "metadata": {"name": "c", "namespace": "default"}, "data": {"discover_hosts.sh": "#!/bin/sh"},
        })  # fmt: skip
        pod = cluster.create(
            "one",
            "cd /etc/mpi; echo up; until grep -q worker discover_hosts.sh; do sleep 0.05; done; sh discover_hosts.sh",
            container={"volumeMounts": [{"name": "v", "mountPath": "/etc/mpi"}]},
            volumes=[{"name": "v", "configMap": {"name": "c"}}],
        )
        await cluster.until(lambda: cluster.log(pod) == "up\n")
        cluster.store.update(r.CONFIG_MAP, {**made, "data": {"discover_hosts.sh": "#!/bin/sh\necho worker-0:1"}})
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.log(pod) == "up\nworker-0:1\n"


async def test_containers_share_an_empty_dir(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        mounts = {"volumeMounts": [{"name": "v", "mountPath": "/shared"}]}
        before = {"name": "i", "image": "demo", "command": ["sh", "-c", "echo left > /shared/f"], **mounts}
        pod = cluster.create("one", "cat /shared/f", container=mounts, initContainers=[before],
                             volumes=[{"name": "v", "emptyDir": {}}])  # fmt: skip
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.log(pod) == "left\n"
