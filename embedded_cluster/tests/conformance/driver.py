"""Runs scenarios on a cluster over HTTP: the embedded one, or any other that a kubeconfig leads to."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import secrets
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from yarl import URL

from .match import differences, nested
from .observe import answer, observe, scrubber, version_of
from .scenario import Scenario

Obj = dict[str, Any]

CORE, BATCH, RBAC = "/api/v1", "/apis/batch/v1", "/apis/rbac.authorization.k8s.io/v1"
GROUPS = {
    **dict.fromkeys(["pods", "services", "configmaps", "secrets", "serviceaccounts", "events"], CORE),
    "jobs": BATCH,
    **dict.fromkeys(["roles", "rolebindings"], RBAC),
    "horizontalpodautoscalers": "/apis/autoscaling/v2",
    "poddisruptionbudgets": "/apis/policy/v1",
    "pytorchjobs": "/apis/kubeflow.org/v1",
}
TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
OF_TRAINER = {"trainjobs": TRAINER, "trainingruntimes": TRAINER, "jobsets": "/apis/jobset.x-k8s.io/v1alpha2"}
PLURALS = {
    "PyTorchJob": "pytorchjobs",
    "MPIJob": "mpijobs",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "JobSet": "jobsets",
    "Pod": "pods",
    "ConfigMap": "configmaps",
    "Job": "jobs",
    "PodDisruptionBudget": "poddisruptionbudgets",
}
PATCHES = {"merge": "merge-patch+json", "json": "json-patch+json", "strategic": "strategic-merge-patch+json"}
ACCOUNTS = (
    "nobody",
    "viewer",
)  # service accounts in the namespace default: without any right, and with the right to read pods
BEHIND = 240  # seconds that a loaded machine may be behind, on top of the time of every wait


STEPS = (
    "create",
    "patch",
    "delete",
    "http",
    "wait",
    "wait_count",
    "logs",
    "kubectl",
    "pause",
    "mark",
    "expire",
    "fault",
)


class Cluster:
    """A cluster and its changes, as seen by one administrator."""

    def __init__(self, kubeconfig: Path, image: str, parallel: int) -> None:
        self.kubeconfig, self.image, self.embedded = kubeconfig, image, False
        self.slots = asyncio.Semaphore(parallel)
        self.recordings: dict[str, Recording] = {}
        self.tokens: dict[str, str | None] = {"anonymous": None, "badtoken": "not-a-token"}
        self.node = ""
        self.free_nodes: list[str] = []  # for scenarios with nodes of their own
        self.groups = dict(GROUPS)
        self.watching: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Cluster]:
        config = yaml.safe_load(self.kubeconfig.read_text())
        self.url, verify, admin, token = login(config)
        async with (
            aiohttp.ClientSession(connector=connector(admin)) as self.admin,
            aiohttp.ClientSession(connector=connector(verify)) as self.others,
        ):
            self.tokens["admin"] = token
            version = await self.json("GET", "/version")
            self.embedded = version["gitVersion"].endswith("+ktrain")  # also one that another process has started
            served = await self.json("GET", "/apis/kubeflow.org")
            versions = [v["version"] for v in served["versions"]]
            self.groups["mpijobs"] = f"/apis/kubeflow.org/{'v2beta1' if 'v2beta1' in versions else 'v1'}"
            groups = await self.json("GET", "/apis")
            if "trainer.kubeflow.org" in {group["name"] for group in groups["groups"]}:
                self.groups |= OF_TRAINER
            nodes = await self.json("GET", f"{CORE}/nodes")
            self.free_nodes = [node["metadata"]["name"] for node in nodes["items"]]
            self.node = self.free_nodes[0]
            made = await self.make_accounts()
            self.watching = {plural: asyncio.Event() for plural in self.groups}
            watches = [asyncio.create_task(self.watch(plural)) for plural in self.groups]
            try:
                await asyncio.wait_for(asyncio.gather(*(seen.wait() for seen in self.watching.values())), BEHIND)
                yield self
            finally:
                for path in made:
                    await self.json("DELETE", path)
                for task in watches:
                    task.cancel()
                ended = await asyncio.gather(*watches, return_exceptions=True)
            for error in ended:
                if not isinstance(error, asyncio.CancelledError):
                    raise RuntimeError("changes were missed") from error

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Obj | None = None, user: str = "admin"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request as `user`; the path is sent as it is."""
        token = self.tokens[user]
        headers = {
            "Accept": "application/json",
            **(headers or {}),
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        session = self.admin if user == "admin" else self.others
        url = URL(self.url + path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        skip = ("Content-Type", "Accept-Encoding") if "Accept-Encoding" not in headers else ("Content-Type",)
        async with session.request(
            method, url, data=body, headers=headers, timeout=timeout, skip_auto_headers=skip, allow_redirects=False
        ) as response:
            yield response

    async def json(self, method: str, path: str, body: Obj | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        async with self.request(method, path, data, {"Content-Type": "application/json"}) as response:
            return await response.json(content_type=None)

    async def restore(self, node: str) -> None:
        """Remove the marks of kubectl and of scenarios from a node."""
        path = f"{CORE}/nodes/{node}"
        found = (await self.json("GET", path))["spec"]
        taints = [t for t in found.get("taints", []) if not t["key"].endswith("/out-of-service")]
        changes = {"spec": {"unschedulable": None, "taints": taints or None}}
        headers = {"Content-Type": "application/merge-patch+json"}
        async with self.request("PATCH", path, json.dumps(changes).encode(), headers):
            pass

    @asynccontextmanager
    async def own_capacity(self, node: str, names: Iterable[str]) -> AsyncIterator[None]:
        """The node has none of these resources at the beginning, and as many as before at the end."""
        path, names = f"{CORE}/nodes/{node}", list(names)
        found = (await self.json("GET", path))["status"]["capacity"] if names else {}
        await self.set_capacity(path, dict.fromkeys(names))
        try:
            yield
        finally:
            await self.set_capacity(path, {name: found.get(name) for name in names})

    async def set_capacity(self, node: str, capacity: Obj) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        body = json.dumps({"status": {"capacity": capacity}}).encode()
        if capacity:
            async with self.request("PATCH", f"{node}/status", body, headers):
                pass

    async def make_accounts(self) -> list[str]:
        """Returns the paths of the objects that it has created."""
        home = f"{CORE}/namespaces/default/serviceaccounts"
        for name in ACCOUNTS:
            await self.json("POST", home, {"metadata": {"name": name}})
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            self.tokens[name] = (await self.json("POST", f"{home}/{name}/token", request))["status"]["token"]
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
        subjects = [{"kind": "ServiceAccount", "name": "viewer", "namespace": "default"}]
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "viewer"}
        base = f"{RBAC}/namespaces/default"
        await self.json("POST", f"{base}/roles", {"metadata": {"name": "viewer"}, "rules": rules})
        binding = {"metadata": {"name": "viewer"}, "subjects": subjects, "roleRef": role}
        await self.json("POST", f"{base}/rolebindings", binding)
        return [f"{base}/rolebindings/viewer", f"{base}/roles/viewer", *(f"{home}/{name}" for name in ACCOUNTS)]

    async def watch(self, plural: str) -> None:
        """Hands every change to the recording of its namespace, for as long as the server lets it."""
        path = f"{self.groups[plural]}/{plural}"
        listed = await self.json("GET", f"{path}?limit=1")
        query = f"watch=1&timeoutSeconds=7200&resourceVersion={listed['metadata']['resourceVersion']}"
        async with self.request("GET", f"{path}?{query}") as response:
            self.watching[plural].set()
            async for line in lines(response):
                change = json.loads(line)
                recording = self.recordings.get(change["object"].get("metadata", {}).get("namespace"))
                if recording:
                    recording.see({"watch": plural, **change})
        raise ConnectionError(f"the watch of {plural} has ended")

    def path(self, plural: str, namespace: str, name: str = "") -> str:
        return f"{self.groups.get(plural, CORE)}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")

    async def run(self, scenario: Scenario) -> list[str]:
        """What is not as expected: empty when all is well."""
        async with self.slots:
            nodes = [self.free_nodes.pop() for _ in range(scenario.nodes)]
            recording = Recording(self, scenario, nodes)
            try:
                async with self.own_capacity(nodes[0] if nodes else self.node, scenario.capacity):
                    return await recording.run()
            finally:
                for node in nodes:
                    await self.json("POST", "/ktrain/faults", {"fault": "recover", "node": node})
                pods = self.path("pods", recording.namespace)
                while nodes and (await self.json("GET", pods)).get("items"):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)  # its pods still hold capacity of the nodes
                for node in nodes:
                    await self.restore(node)
                    self.free_nodes.append(node)


class Recording:
    """One scenario in a namespace of its own."""

    def __init__(self, cluster: Cluster, scenario: Scenario, nodes: Sequence[str] = ()) -> None:
        self.cluster, self.scenario = cluster, scenario
        self.namespace = f"{scenario.name}-{secrets.token_hex(2)}"
        self.values = {"ns": self.namespace, "image": cluster.image, "node": cluster.node}
        self.values |= dict(zip(("node", "other"), nodes, strict=False))
        self.changes: list[Obj] = []
        self.objects: dict[str, Obj] = {}
        self.waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self.found: list[str] = []
        self.background: list[asyncio.Task[None]] = []
        self.versions: dict[str, str] = {}
        self.scrub: Callable[[Any], Any] = scrubber({text: placeholder(name) for name, text in self.values.items()})

    def see(self, change: Obj) -> None:
        key = f"{change['watch']}/{change['object']['metadata']['name']}"
        self.changes.append(change)
        if change["type"] == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = change["object"]
        for right, future in self.waiters:
            if not future.done() and right():
                future.set_result(None)

    async def until(self, right: Callable[[], bool], seconds: float) -> bool:
        """Whether it was right, if only for a moment, within so many seconds."""
        if right():
            return True
        waiter = right, asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter[1]
        except TimeoutError:
            return False
        finally:
            self.waiters.remove(waiter)
        return True

    async def run(self) -> list[str]:
        self.cluster.recordings[self.namespace] = self
        await self.cluster.json("POST", f"{CORE}/namespaces", {"metadata": {"name": self.namespace}})
        made = {"serviceaccounts/default", "configmaps/kube-root-ca.crt"}
        if not await self.until(lambda: made <= self.objects.keys(), BEHIND):
            self.found.append(f"a new namespace should get {sorted(made)}, it has {sorted(self.objects)}")
        try:
            for step in self.scenario.steps:
                await self.step(step)
            await asyncio.gather(*self.background)
            await self.expect()
        finally:
            for task in self.background:
                task.cancel()
            self.cluster.recordings.pop(self.namespace)
            await self.cluster.json("DELETE", f"{CORE}/namespaces/{self.namespace}")
        return self.found

    async def expect(self) -> None:
        """Wait until everything is as expected, and stays so. What was seen too late comes again, in a loop."""
        wrong: list[str] = []
        seen = -1

        def right() -> bool:
            nonlocal seen, wrong
            if len(self.changes) != seen:
                seen = len(self.changes)
                wrong = differences(self.scenario.expect, observe(self.changes, self.scrub))
            return not wrong

        loop = asyncio.get_running_loop()
        end = loop.time() + self.scenario.timeout + BEHIND
        while await self.until(right, end - loop.time()):
            if not await self.until(lambda: not right(), self.scenario.hold):
                return
        self.found += wrong

    # steps

    async def step(self, step: Obj) -> None:
        for verb in STEPS:
            if verb in step:
                if self.cluster.embedded and "embedded" in step:
                    step = {**step, **step["embedded"]}
                await getattr(self, verb)(self.fill(step))
                return
        raise ValueError(f"{self.scenario.name}: no step can be made of {step}")

    def fill(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.fill(k): self.fill(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.fill(v) for v in value]
        for name, text in self.values.items() if isinstance(value, str) else ():
            value = value.replace(placeholder(name), text)
        return value

    async def pause(self, step: Obj) -> None:
        """Time in which nothing is asked of the cluster: for behaviour that is about time."""
        await asyncio.sleep(step["pause"])

    async def expire(self, step: Obj) -> None:
        """Versions and continue tokens expire: by time on a real cluster, by a fault switch on the embedded one."""
        if self.cluster.embedded:
            await self.cluster.json("POST", "/ktrain/faults", {"fault": "expire"})
        else:
            await asyncio.sleep(step["expire"])

    async def fault(self, step: Obj) -> None:
        """A fault switch of the embedded cluster, for what happens to the machine of a node on a real one."""
        answer = await self.cluster.json("POST", "/ktrain/faults", step["fault"])
        if answer.get("status") != "Success":
            self.found.append(f"fault {step['fault']}: {answer}")

    async def mark(self, step: Obj) -> None:
        self.values[step["mark"]] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def wait(self, step: Obj) -> None:
        await self.waited(step, lambda: holds(self.objects.get(step["wait"]), step))

    async def wait_count(self, step: Obj) -> None:
        prefix = f"{step['wait_count']}/"

        def right() -> bool:
            found = [obj for key, obj in self.objects.items() if key.startswith(prefix) and holds(obj, step)]
            return len(found) == step["count"]

        await self.waited(step, right)

    async def waited(self, step: Obj, right: Callable[[], bool]) -> None:
        if not await self.until(right, step.get("timeout", 60) + BEHIND):
            condition = {k: v for k, v in step.items() if k != "timeout"}
            self.found.append(f"timeout while waiting for {condition}")

    async def create(self, step: Obj) -> None:
        docs = self.scenario.manifest if step["create"] == "all" else [self.scenario.manifest[step["create"]]]
        query = {"fieldManager": "conformance", "fieldValidation": "Strict", **step.get("query", {})}
        text = "&".join(f"{k}={v}" for k, v in query.items() if v)
        for doc in docs:
            body = self.fill(doc)
            path = self.cluster.path(PLURALS[doc["kind"]], self.namespace)
            expected = {"answer": {"status": 201, **step.get("answer", {})}}
            await self.call(
                {"name": f"create {body['metadata']['name'][:20]}", **step, **expected}, "POST", f"{path}?{text}", body
            )

    async def patch(self, step: Obj) -> None:
        headers = {"Content-Type": f"application/{PATCHES[step.get('type', 'merge')]}"}
        await self.write("patch", {**step, "headers": headers})

    async def delete(self, step: Obj) -> None:
        await self.write("delete", step)

    async def write(self, verb: str, step: Obj) -> None:
        plural, name = step[verb].split("/")
        query = "&".join(f"{k}={v}" for k, v in step.get("query", {}).items())
        expected = {"answer": {"status": 200, **step.get("answer", {})}}
        await self.call(
            {"name": verb, **step, **expected},
            verb.upper(),
            self.cluster.path(plural, self.namespace, name) + ("?" + query if query else ""),
            step.get("body"),
        )

    async def http(self, step: Obj) -> None:
        method, path = step["http"].split(" ", 1)
        if step.get("background"):
            self.background.append(asyncio.create_task(self.call(step, method, path, step.get("body"))))
        else:
            await self.call(step, method, path, step.get("body"))

    async def call(self, step: Obj, method: str, path: str, body: Any) -> None:
        """Send one request and compare its answer with the step. The client disconnects after `seconds`, if set."""
        headers = {str(k): str(v) for k, v in step.get("headers", {}).items()}
        data = step["text"].encode() if "text" in step else json.dumps(body).encode() if body is not None else None
        if data is not None:
            headers.setdefault("Content-Type", "application/json")
        streamed = "seconds" in step or step.get("background", False)
        chunks, ended = bytearray(), "by the server"
        try:
            async with asyncio.timeout(step.get("seconds")):
                async with self.cluster.request(method, path, data, headers, step.get("as", "admin")) as response:
                    status, received = response.status, list(response.headers.items())
                    async for chunk in response.content.iter_any():
                        chunks += chunk
        except TimeoutError:
            ended = "by the client"
        text = chunks.decode(errors="replace")
        seen = answer(status, received, text, streamed, self.scrub)
        seen |= {"ended": ended} if streamed else {}
        seen |= version_of(text, self.versions)
        for name, where in step.get("save", {}).items():
            value = dig(json.loads(text), where)
            self.values[name] = value if isinstance(value, str) else json.dumps(value)
        self.found += nested(f"{step.get('name', path)!r}", self.scrub(step.get("answer", {})), seen)

    async def logs(self, step: Obj) -> None:
        """The lines that the first container of the pod of this name has written."""
        pods = (obj for key, obj in self.objects.items() if key.startswith("pods/"))
        pod = next(p["metadata"]["name"] for p in pods if self.scrub(p["metadata"]["name"]) == step["logs"])
        path = f"{self.cluster.path('pods', self.namespace, pod)}/log"
        async with self.cluster.request("GET", path) as response:
            seen = {"lines": self.scrub((await response.text()).splitlines())}
        self.found += nested(f"logs of {step['logs']!r}", step["answer"], seen)

    async def kubectl(self, step: Obj) -> None:
        text = yaml.safe_dump(self.fill(self.scenario.manifest[step["doc"]]), sort_keys=False) if "doc" in step else ""
        args = ["--kubeconfig", str(self.cluster.kubeconfig), "-n", self.namespace, *map(str, step["kubectl"])]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("kubectl", *args, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await process.communicate(text.encode())
        seen = self.scrub({"exit": process.returncode, "stdout": out.decode(), "stderr": err.decode()})
        self.found += nested(f"{step['name']!r}", step.get("answer", {}), seen)


def placeholder(name: str) -> str:
    return f"{{{name}}}"


def holds(obj: Obj | None, step: Obj) -> bool:
    """Whether a wait is over: `gone`, a true `condition`, or `path` with equals, not, or nothing (exists)."""
    if obj is None or step.get("gone"):
        return obj is None and bool(step.get("gone"))
    if "condition" in step:
        conditions = obj.get("status", {}).get("conditions") or []
        return any(c["type"] == step["condition"] and c["status"] == "True" for c in conditions)
    value = dig(obj, step["path"]) if "path" in step else None
    if "equals" in step:
        return bool(value == step["equals"])
    if "not" in step:
        return value is not None and value != step["not"]
    return "path" not in step or value is not None


def dig(obj: Any, path: str) -> Any:
    for key in path.split("."):
        try:
            obj = obj[int(key)] if isinstance(obj, list) else obj[key]
        except (KeyError, IndexError, TypeError):
            return None
    return obj


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length, as they come."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield line


def connector(context: ssl.SSLContext) -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(ssl=context, limit=0)


def login(config: Obj) -> tuple[str, ssl.SSLContext, ssl.SSLContext, str | None]:
    """Of a kubeconfig's current context: the server, TLS without and with the client's certificate, the token."""
    named = {
        (kind, entry["name"]): entry[kind[:-1]] for kind in ("contexts", "clusters", "users") for entry in config[kind]
    }
    context = named["contexts", config["current-context"]]
    cluster, user = named["clusters", context["cluster"]], named["users", context["user"]]
    verify = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"), cadata=text_of(cluster, "certificate-authority")
    )
    admin = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"), cadata=text_of(cluster, "certificate-authority")
    )
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile("w") as pair:
            pair.write(f"{text_of(user, 'client-certificate')}\n{text_of(user, 'client-key')}\n")
            pair.flush()
            admin.load_cert_chain(pair.name)
    elif "client-certificate" in user:
        admin.load_cert_chain(user["client-certificate"], user["client-key"])
    return cluster["server"], verify, admin, user.get("token")


def text_of(entry: Obj, key: str) -> str | None:
    data = entry.get(f"{key}-data")
    return base64.b64decode(data).decode() if data else None
