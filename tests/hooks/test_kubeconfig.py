"""Connections give the same client configuration as to Airflow's synchronous KubernetesHook."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes.config.incluster_config as sync_incluster
import kubernetes.config.kube_config as sync_kubeconfig
import kubernetes_asyncio.config.incluster_config as async_incluster
import kubernetes_asyncio.config.kube_config as async_kubeconfig
import pytest
import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook, KubernetesHook

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.core.text.output import masked
from airflow_provider_ktrain.hooks import kubeconfig
from airflow_provider_ktrain.hooks.training import TrainingHook
from tests.hooks.certificates import CERTIFICATE, KEY
from tests.until import until

TRIGGERS = 20
Extras = Mapping[str, Any]


def config(folder: Path) -> dict[str, Any]:
    """A kubeconfig with each way to authenticate and each option of a cluster that both clients know."""
    (folder / "token").write_text("from-a-file")
    (folder / "ca.crt").write_text(CERTIFICATE)
    plugin = folder / "plugin"
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "of-plugin"},
    }
    plugin.write_text(f"#!/bin/sh\ncat <<END\n{json.dumps(answer)}\nEND\n")
    plugin.chmod(0o755)
    data = {name: base64.b64encode(text.encode()).decode() for name, text in (("crt", CERTIFICATE), ("key", KEY))}
    clusters: dict[str, dict[str, Any]] = {
        "plain": {"certificate-authority-data": data["crt"]},
        "by-file": {"certificate-authority": str(folder / "ca.crt")},
        "unverified": {"insecure-skip-tls-verify": True},
        "named": {"tls-server-name": "kubernetes.default", "proxy-url": "http://proxy.example:3128"},
    }
    users = {
        "token": {"token": "of-user"},
        "token-file": {"tokenFile": str(folder / "token")},
        "certificate": {"client-certificate-data": data["crt"], "client-key-data": data["key"]},
        "password": {"username": "me", "password": "of-basic-auth"},
        "plugin": {"exec": {"apiVersion": answer["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}},
    }
    contexts = [("first", "plain", "token"), *((u, "by-file", u) for u in users), *((c, c, "token") for c in clusters)]
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "first",
        "clusters": [{"name": n, "cluster": {"server": f"https://{n}.example:6443", **c}} for n, c in clusters.items()],
        "users": [{"name": name, "user": user} for name, user in users.items()],
        "contexts": [{"name": n, "context": {"cluster": c, "user": u}} for n, c, u in contexts],
    }


CONTEXTS = ["token", "token-file", "certificate", "password", "plugin", "plain", "by-file", "unverified", "named"]
PATH, INLINE = "PATH", "INLINE"  # stand for the kubeconfig of the test
TABLE: list[Extras] = [
    {},
    {"kube_config_path": PATH},
    {"kube_config": INLINE},
    {"kube_config": {"as": "dict"}},
    {"in_cluster": True},
    {"in_cluster": True, "disable_verify_ssl": True},
    {"kube_config_path": PATH, "disable_verify_ssl": True},
    {"kube_config_path": PATH, "disable_verify_ssl": "True"},
    {"kube_config_path": PATH, "disable_verify_ssl": "false"},
    {"kube_config_path": PATH, "disable_verify_ssl": "perhaps"},
    {"disable_verify_ssl": True},
    # a form stores what is left empty
    {"kube_config_path": "", "kube_config": "", "in_cluster": False, "cluster_context": "", "namespace": ""},
    {"kube_config_path": PATH, "kube_config": "", "in_cluster": False},
    # Airflow before 2.3
    {"extra__kubernetes__kube_config_path": PATH, "extra__kubernetes__cluster_context": "certificate"},
    {"extra__kubernetes__kube_config": INLINE, "extra__kubernetes__disable_verify_ssl": True},
    {"extra__kubernetes__in_cluster": True},
    {"kube_config_path": "", "extra__kubernetes__kube_config_path": "/nowhere"},
    # what has no part in the client; ssl_ca_cert is an option of the KubernetesExecutor
    {"kube_config_path": PATH, "namespace": "team", "disable_tcp_keepalive": True, "xcom_sidecar_container_image": "x"},
    {"kube_config_path": PATH, "ssl_ca_cert": "/nowhere"},
    *({"kube_config_path": PATH, "cluster_context": context} for context in CONTEXTS),
]


def title(extras: Extras) -> str:
    return (
        ",".join(f"{name.replace('extra__kubernetes__', 'old_')}={value}" for name, value in extras.items()) or "none"
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a kubeconfig at the default place, which is not a pod."""
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config(tmp_path)))
    for module in (sync_kubeconfig, async_kubeconfig):
        monkeypatch.setattr(module, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.delenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return tmp_path


@pytest.fixture
def pod(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a pod with a service account."""
    (home / "sa-token").write_text("of-service-account")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for module in (sync_incluster, async_incluster):
        monkeypatch.setattr(module, "SERVICE_TOKEN_FILENAME", str(home / "sa-token"))
        monkeypatch.setattr(module, "SERVICE_CERT_FILENAME", str(home / "ca.crt"))
    return home


def define(extras: Extras, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (home / "kubeconfig").read_text()
    known = {PATH: str(home / "kubeconfig"), INLINE: json.dumps(yaml.safe_load(content))}
    filled = {n: yaml.safe_load(content) if isinstance(v, dict) else known.get(str(v), v) for n, v in extras.items()}
    value = json.dumps({"conn_type": "kubernetes", "extra": filled})
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", value)


def seen(configuration: Any, header: str) -> dict[str, Any]:
    """What decides which server is asked, and as whom; files by their content."""

    def content(path: str | None) -> str:
        return Path(path).read_text() if path else ""

    plain = {name: getattr(configuration, name) for name in ("host", "verify_ssl", "tls_server_name")}
    files = {name: content(getattr(configuration, name)) for name in ("ssl_ca_cert", "cert_file", "key_file")}
    kind, _, token = header.partition(" ")  # the clients write Bearer in different cases
    return {**plain, **files, "auth": (kind.lower(), token)}  # the synchronous client ignores proxy-url, kubectl not


def theirs() -> dict[str, Any]:
    client = KubernetesHook().get_conn()
    headers: dict[str, str] = {}
    client.update_params_for_auth(headers, [], ["BearerToken"])
    return seen(client.configuration, headers.get("authorization", ""))


async def ours() -> dict[str, Any]:
    hook = TrainingHook()
    hook.load()
    client = await hook.make_client()
    headers: dict[str, str] = {}
    await client.update_params_for_auth(headers, [], ["BearerToken"])
    await client.close()
    return seen(client.configuration, headers.get("authorization", ""))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("extras", TABLE, ids=title)
async def test_extras_have_the_same_effect_as_in_airflow_in_a_pod(
    pod: Path, monkeypatch: pytest.MonkeyPatch, extras: Extras
) -> None:
    define(extras, pod, monkeypatch)
    assert await ours() == theirs()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("extras", [e for e in TABLE if "in_cluster" not in title(e) or not any(e.values())], ids=title)
async def test_extras_have_the_same_effect_as_in_airflow_outside_a_pod(
    home: Path, monkeypatch: pytest.MonkeyPatch, extras: Extras
) -> None:
    define(extras, home, monkeypatch)
    assert await ours() == theirs()


async def test_undefined_connection_uses_the_service_account_of_the_pod(pod: Path) -> None:
    assert await ours() == theirs()
    assert (await ours())["auth"] == ("bearer", "of-service-account")


async def test_undefined_connection_uses_the_default_kubeconfig_outside_a_pod(home: Path) -> None:
    assert await ours() == theirs()
    assert (await ours())["host"] == "https://plain.example:6443"


async def test_context_argument_overrides_the_connection(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    define({"kube_config_path": PATH, "cluster_context": "token"}, home, monkeypatch)
    hook = TrainingHook(cluster_context="unverified")
    hook.load()
    client = await hook.make_client()
    await client.close()
    assert client.configuration.host == "https://unverified.example:6443"


async def test_missing_connection_and_kubeconfig_give_an_error_with_a_remedy(home: Path) -> None:
    (home / "kubeconfig").unlink()
    with pytest.raises(AccessError) as error:
        await ours()
    first, remedy = str(error.value).splitlines()
    assert first.startswith("No cluster is configured: the connection 'kubernetes_default' is missing or empty")
    assert "airflow connections add kubernetes_default --conn-type kubernetes" in remedy


async def test_undefined_connection_is_an_error_with_a_remedy(home: Path) -> None:
    with pytest.raises(
        AccessError, match=r"There is no connection 'elsewhere'. Add it: airflow connections add elsewhere"
    ):
        TrainingHook("elsewhere").load()


async def test_trigger_reads_its_own_connection(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triggers don't call `load`: they read the connection in their event loop."""
    define({"kube_config_path": PATH}, home, monkeypatch)
    other = {"kube_config_path": str(home / "kubeconfig"), "cluster_context": "unverified"}
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps({"conn_type": "kubernetes", "extra": other}))
    client = await TrainingHook("other").make_client()
    await client.close()
    assert client.configuration.host == "https://unverified.example:6443"
    with pytest.raises(AccessError, match="There is no connection 'elsewhere'"):
        await TrainingHook("elsewhere").make_client()


async def test_two_kubeconfig_sources_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    define({"kube_config_path": PATH, "in_cluster": True}, home, monkeypatch)
    with pytest.raises(
        AccessError,
        match=r"The connection '[^']*' can't be used\.(?s:.)*\nInvalid connection configuration.*mutually exclusive",
    ):
        await ours()


# exec plugins


def plugin(home: Path, script: str) -> None:
    (home / "plugin").write_text(f"#!/bin/sh\n{script}\n")


async def test_hanging_exec_plugin_is_killed_with_its_children(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "BUILD_TIMEOUT", 3.0)
    plugin(home, f"sleep 1000 & echo $! > {home}/pid; wait")
    with pytest.raises(AccessError, match=r"exec plugin did not end within 3 s and was killed"):
        await kubeconfig.configuration("c", "plugin", {"kube_config_path": str(home / "kubeconfig")})
    child = int((home / "pid").read_text())
    await until(lambda: is_gone(child), 60)


async def test_exec_plugin_that_has_not_quite_started_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process runs, but its pipes are not connected yet, as on a machine that was suspended meanwhile."""
    monkeypatch.setattr(kubeconfig, "BUILD_TIMEOUT", 0.0)
    plugin(home, "sleep 1000 & wait")
    with pytest.raises(AccessError, match=r"exec plugin did not end within 0 s and was killed"):
        await kubeconfig.configuration("c", "plugin", {"kube_config_path": str(home / "kubeconfig")})


def is_gone(pid: int) -> bool:
    """Whether a process has ended; who would reap it may not have done so yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_error_in_an_inline_kubeconfig_has_its_place_and_no_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "users:\n- name: me\n  user:\n    token: s3cr3t-word\n   x: [\n"
    extra = {"conn_type": "kubernetes", "extra": {"kube_config": broken}}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps(extra))
    with pytest.raises(AccessError, match=r"kube_config is not valid YAML: \w+ in line 5, column \d+") as raised:
        await ours()
    assert "s3cr3t" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("tag", ["int", "float", "bool"])
async def test_value_of_an_inline_kubeconfig_is_not_quoted(
    tag: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"conn_type": "kubernetes", "extra": {"kube_config": f"users: [{{user: {{token: !!{tag} s3cr3t}}}}]"}}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps(extra))
    with pytest.raises(AccessError, match=r"kube_config is not valid YAML: (Value|Key)Error") as raised:
        await ours()
    assert "s3cr3t" not in "".join(traceback.format_exception(raised.value))


async def test_token_in_the_output_of_an_exec_plugin_is_hidden(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(home, "echo 'got k8s-aws-v1.aHR0cHM6Ly9zdHMuZXUtd2VzdC0xLm' >&2; exit 4")
    define({"kube_config_path": PATH, "cluster_context": "plugin"}, home, monkeypatch)
    with pytest.raises(AccessError) as raised:
        await ours()
    assert "aHR0cHM6" not in masked(str(raised.value))


async def test_error_of_an_exec_plugin_quotes_its_output(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(home, r"printf 'no role today\000' >&2; exit 4")
    define({"kube_config_path": PATH, "cluster_context": "plugin"}, home, monkeypatch)
    with pytest.raises(
        AccessError, match=r"The connection '[^']*' can't be used\.(?s:.)*\nexec: process returned 4. no role today"
    ) as error:
        await ours()
    assert "\0" not in str(error.value), "PostgreSQL refuses it"


async def test_exec_plugin_gets_no_stdin(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is answered by its supervisor there."""
    plugin(home, "cat; exit 5")
    read, write = os.pipe()
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        define({"kube_config_path": PATH, "cluster_context": "plugin"}, home, monkeypatch)
        with pytest.raises(AccessError, match="process returned 5"):
            await ours()
    finally:
        os.dup2(before, 0)
        for descriptor in (read, write, before):
            os.close(descriptor)


# files


@pytest.mark.parametrize(
    ("extras", "file"),
    [
        ({"kube_config_path": PATH}, "kubeconfig"), ({"kube_config_path": PATH}, "token"),
        ({"kube_config_path": PATH}, "ca.crt"), ({}, "kubeconfig"), ({}, "token"),
    ],
)  # fmt: skip
async def test_changed_kubeconfig_is_detected(
    home: Path, monkeypatch: pytest.MonkeyPatch, extras: Extras, file: str
) -> None:
    define(extras, home, monkeypatch)
    hook = TrainingHook()
    hook.load()
    await (await hook.make_client()).close()
    assert not await hook.changed()
    content = (home / file).read_text()
    (home / file).write_text(content)
    assert not await hook.changed(), "it was written again as it was"
    (home / file).write_text(content + "\n")
    assert await hook.changed()
    await (await hook.make_client()).close()
    assert not await hook.changed()


async def test_triggers_that_start_together_read_the_connection_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, answer = tmp_path / "kubeconfig", 0, asyncio.Event()
    path.write_text(yaml.safe_dump(config(tmp_path)))

    async def extras(hook: AsyncKubernetesHook) -> Extras:
        nonlocal asked
        asked += 1
        await answer.wait()
        return {"kube_config_path": str(path)}

    monkeypatch.setattr(AsyncKubernetesHook, "get_conn_extras", extras)
    started = 0

    async def start() -> str:
        nonlocal started
        started += 1
        async with TrainingHook().api() as api:
            return await api.cluster()

    first = asyncio.ensure_future(start())
    await until(lambda: asked)
    first.cancel()  # the others still get the answer
    others = [asyncio.ensure_future(start()) for _ in range(TRIGGERS)]
    await until(lambda: started > TRIGGERS)
    assert asked == 1
    answer.set()
    assert len(set(await asyncio.gather(*others))) == 1
