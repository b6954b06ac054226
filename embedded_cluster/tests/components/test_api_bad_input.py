"""Whatever is sent, the answer is a Status with the code of a real server: never a traceback, never a hang."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.raw_client import Client, eventually
from ktrain_embedded.cluster import EmbeddedCluster

HOME = "/apis/kubeflow.org/v1/namespaces/fuzz"
JOBS, MAPS, PODS = f"{HOME}/pytorchjobs", "/api/v1/namespaces/fuzz/configmaps", "/api/v1/namespaces/fuzz/pods"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def api(cluster: EmbeddedCluster) -> Iterator[Client]:
    """A client of the namespace `fuzz`, and at the end a cluster that works as if nothing had been."""
    client, log = Client(cluster), cluster.state_dir / "server.log"
    size = log.stat().st_size
    client("POST", "/api/v1/namespaces", {"metadata": {"name": "fuzz"}})
    eventually(lambda: client("GET", "/api/v1/namespaces/fuzz/serviceaccounts/default").status == 200)
    yield client
    assert client("POST", JOBS, job("sound")).status == 201
    eventually(lambda: client("GET", f"{JOBS}/sound").json.get("status", {}).get("conditions"))
    assert b"Traceback" not in log.read_bytes()[size:]


def job(name: str) -> dict[str, Any]:
    container = {"name": "pytorch", "image": "none:1", "imagePullPolicy": "Never", "command": ["true"]}
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {"Master": replica}},
    }  # fmt: skip


LAUGHS = "\n".join(["a0: &a0 ha", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))])
BODIES: list[tuple[Any, dict[str, str], int, str]] = [
    ("", JSON, 400, "BadRequest"),
    ("{", JSON, 400, "BadRequest"),
    ("null", JSON, 400, "BadRequest"),
    ("[]", JSON, 400, "BadRequest"),
    ('"text"', JSON, 400, "BadRequest"),
    ("{} {}", JSON, 400, "BadRequest"),
    ('{"metadata": {"name": "n", "annotations": {"a": NaN}}}', JSON, 400, "BadRequest"),
    ('{"data": 1e999}', JSON, 400, "BadRequest"),
    ('{"data": ' + "1" * 10_000 + "}", JSON, 400, "BadRequest"),
    ("[" * 100_000, JSON, 400, "BadRequest"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, JSON, 400, "BadRequest"),
    (b'{"metadata": {"name": "\xff\xfe"}}', JSON, 422, "Invalid"),
    (b"\x00\x01\x02", JSON, 400, "BadRequest"),
    (b"\xff\xfe{}", JSON, 400, "BadRequest"),
    ("metadata: [", {"Content-Type": "application/yaml"}, 400, "BadRequest"),
    ("a: &a [*a, *a]", {"Content-Type": "application/yaml"}, 400, "BadRequest"),
    (LAUGHS, {"Content-Type": "application/yaml"}, 400, "BadRequest"),
    ("? [a]\n: b", {"Content-Type": "application/yaml"}, 400, "BadRequest"),
    ("a: .nan", {"Content-Type": "application/yaml"}, 400, "BadRequest"),
    ("a: !!binary eA==", {"Content-Type": "application/yaml"}, 400, "BadRequest"),
    (b"k8s\x00nonsense", {"Content-Type": "application/vnd.kubernetes.protobuf"}, 400, "BadRequest"),
    ("{}", {"Content-Type": "text/plain"}, 415, "UnsupportedMediaType"),
    ("{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "UnsupportedMediaType"),
    ("{}", {"Content-Type": "nonsense"}, 415, "UnsupportedMediaType"),
    ("{}", {**JSON, "Accept": "image/png"}, 406, "NotAcceptable"),
    (json.dumps({"metadata": {"name": "big"}, "data": {"a": "x" * 4_000_000}}), JSON, 413, "RequestEntityTooLarge"),
    (json.dumps({"metadata": {"name": 7}}), JSON, 400, "BadRequest"),
    (json.dumps({"metadata": []}), JSON, 400, "BadRequest"),
    (json.dumps({"metadata": {"name": "../../etc"}}), JSON, 422, "Invalid"),
    (json.dumps({"metadata": {"name": "n" * 300}}), JSON, 422, "Invalid"),
    (json.dumps({"metadata": {"name": "n", "labels": {"a b": "c"}}}), JSON, 422, "Invalid"),
    (json.dumps({"metadata": {"name": "n", "namespace": "other"}}), JSON, 400, "BadRequest"),
    (json.dumps({"metadata": {"name": "n"}, "kind": "Pod", "apiVersion": "v1"}), JSON, 400, "BadRequest"),
]


@pytest.mark.parametrize(("body", "headers", "code", "reason"), BODIES, ids=[str(b[0])[:24] for b in BODIES])
def test_invalid_bodies_are_refused_with_a_status(
    api: Client, body: Any, headers: dict[str, str], code: int, reason: str
) -> None:
    answer = api("POST", MAPS, body, headers)
    assert (answer.status, answer.body["kind"], answer.body["reason"]) == (code, "Status", reason), answer.body


RBAC, REVIEWS = "/apis/rbac.authorization.k8s.io/v1/namespaces/fuzz", "/apis/authorization.k8s.io/v1"
BATCH = "/apis/batch/v1/namespaces/fuzz/jobs"
ONE = {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}
TOKEN = "/api/v1/namespaces/fuzz/serviceaccounts/default/token"
OBJECTS: list[tuple[str, dict[str, Any], int]] = [
    (PODS, {"metadata": {"name": "p"}}, 422),
    (PODS, {"metadata": {"name": "p"}, "spec": {"containers": [None]}}, 422),
    (PODS, {"metadata": {"name": "p"}, "spec": {"containers": [{"resources": {"limits": ["1"]}}]}}, 400),
    (MAPS, {"metadata": {"name": "m", "ownerReferences": [None]}}, 422),
    (MAPS, {"metadata": {"name": "m", "ownerReferences": [{"kind": "Pod", "name": "p"}]}}, 422),
    (JOBS, {**job("owned"), "metadata": {"name": "owned", "ownerReferences": [None]}}, 422),
    (PODS, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}], "volumes": [{}]}}, 422),
    (BATCH, {"metadata": {"name": "j"}, "spec": {"template": {"spec": ONE}, "completions": -1}}, 422),
    (f"{RBAC}/rolebindings", {"metadata": {"name": "b"}}, 422),
    (f"{RBAC}/rolebindings", {"metadata": {"name": "b"}, "roleRef": {"kind": "Pod", "name": "r"}}, 422),
    (f"{RBAC}/roles", {"metadata": {"name": "r"}, "rules": "all"}, 400),
    (f"{REVIEWS}/selfsubjectaccessreviews", {"spec": []}, 400),
    (f"{REVIEWS}/selfsubjectaccessreviews", {"spec": {"resourceAttributes": "pods"}}, 400),
    (f"{REVIEWS}/selfsubjectrulesreviews", {"spec": {"namespace": 7}}, 400),
    (TOKEN, {"spec": {"expirationSeconds": "long"}}, 400),
    (TOKEN, {"spec": {"expirationSeconds": 5}}, 422),
    (TOKEN, {"spec": {"expirationSeconds": 10**18}}, 422),
]


@pytest.mark.parametrize(("path", "body", "code"), OBJECTS, ids=lambda value: str(value)[-40:])
def test_invalid_objects_are_refused_with_a_status(api: Client, path: str, body: dict[str, Any], code: int) -> None:
    answer = api("POST", path, body)
    assert (answer.status, answer.body["kind"]) == (code, "Status"), answer.body


def test_lone_surrogates_are_replaced(api: Client) -> None:
    body = '{"metadata": {"name": "half"}, "data": {"a": "x\\ud800y", "b": "\\ud83d\\ude00"}}'
    assert api("POST", MAPS, body).json["data"] == {"a": "x\ufffdy", "b": "\U0001f600"}
    (event,) = api.lines(f"{MAPS}?watch=true&fieldSelector=metadata.name%3Dhalf&timeoutSeconds=1")
    assert event["object"]["data"]["a"] == "x\ufffdy"


@pytest.mark.parametrize(
    ("scale", "code"),
    [([], 400), ({"spec": [1]}, 403), ({"spec": {"replicas": "2"}}, 422), ({"spec": {"replicas": -1}}, 422)],
)
def test_invalid_scale_is_refused(api: Client, scale: Any, code: int) -> None:
    wide = job("wide")
    specs = wide["spec"]["pytorchReplicaSpecs"]
    wide["spec"] = {"runPolicy": {"suspend": True}, "pytorchReplicaSpecs": {**specs, "Worker": specs["Master"]}}
    assert api("POST", JOBS, wide).status in (201, 409)
    answer = api("PUT", f"{JOBS}/wide/scale", scale)
    assert (answer.status, answer.body["kind"]) == (code, "Status"), answer.body
    assert api("GET", f"{JOBS}/wide/scale").json["spec"] == {"replicas": 1}


QUERIES = [
    ("labelSelector=" + quote("a in (b"), 400, "BadRequest"),
    ("labelSelector=" + quote("=,=,="), 400, "BadRequest"),
    ("labelSelector=" + quote("a=" + "b" * 10_000), 400, "BadRequest"),
    ("labelSelector=" + quote("(" * 5_000), 400, "BadRequest"),
    ("labelSelector=%ff%fe", 400, "BadRequest"),
    ("fieldSelector=spec.nothing%3D1", 400, "BadRequest"),
    ("fieldSelector=metadata.name", 400, "BadRequest"),
    ("limit=many", 400, "BadRequest"),
    ("limit=99999999999999999999", 400, "BadRequest"),
    ("timeoutSeconds=1.5", 400, "BadRequest"),
    ("continue=nonsense", 400, "BadRequest"),
    ("resourceVersion=x", 400, "BadRequest"),
    ("resourceVersionMatch=Exact", 422, "Invalid"),
]


@pytest.mark.parametrize(("query", "code", "reason"), QUERIES, ids=[q[0][:40] for q in QUERIES])
def test_invalid_queries_are_refused(api: Client, query: str, code: int, reason: str) -> None:
    answer = api("GET", f"{MAPS}?{query}")
    assert (answer.status, answer.body.get("reason")) == (code, reason), answer.body


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/apis/kubeflow.org/v1/namespaces/fuzz/nothings", 404),
        ("GET", "/apis/kubeflow.org/v9/namespaces/fuzz/pytorchjobs", 404),
        ("GET", "/apis/none.example/v1", 404),
        ("GET", f"{PODS}/none/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/%00", 404),
        ("GET", f"{PODS}/%00", 404),
        ("GET", f"{PODS}/%ff", 404),
        ("GET", "/" + "a/" * 2_000, 404),
        ("PATCH", MAPS, 405),
        ("PUT", MAPS, 405),
        ("DELETE", "/api/v1/namespaces", 405),
        ("POST", f"{MAPS}/name", 405),
        ("OPTIONS", MAPS, 405),
    ],
)
def test_unknown_paths_and_methods_are_refused(api: Client, method: str, path: str, code: int) -> None:
    assert api(method, path, "{}" if method != "GET" else None).status == code


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"GET " + b"/" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /api HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /api HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_requests_that_are_not_http_do_not_stop_the_server(cluster: EmbeddedCluster, api: Client, sent: bytes) -> None:
    address = urlsplit(cluster.url)
    tls = ssl.create_default_context(cafile=str(cluster.ca_file))
    with (
        socket.create_connection((address.hostname or "", address.port or 0), timeout=120) as plain,
        tls.wrap_socket(plain, server_hostname=address.hostname) as connection,
    ):
        connection.sendall(sent)
        answer = connection.recv(1 << 16)
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert b"Traceback" not in answer
    assert api("GET", "/healthz").status == 200


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A job in which one value, anywhere, is another one."""
    whole = {"job": job(draw(st.sampled_from(["a", "b", "c"])))}
    at: Any = whole
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or draw(st.integers(0, 4)) == 0:
            break
        at = at[key]
    at[key] = draw(values)
    if isinstance(at, dict) and draw(st.booleans()):
        at[draw(st.sampled_from(["suspend", "status", "finalizers", "replicas", "env", "volumes"]))] = draw(values)
    return whole["job"]


odd_names = st.text(max_size=8).map(lambda text: quote(text, safe=""))
names = st.sampled_from(["a", "b", "c", "kube-root-ca.crt"]) | odd_names
subresources = st.sampled_from(["", "/status", "/scale", "/log", "/eviction", "/x"])
paths = st.one_of(
    st.sampled_from([JOBS, MAPS, PODS, "/api", "/apis", "/openapi/v3"]),
    st.builds("{}/{}{}".format, st.sampled_from([JOBS, MAPS, PODS]), names, subresources),
    st.lists(odd_names, max_size=6).map(lambda parts: "/" + "/".join(parts)),
)  # fmt: skip
QUERY_NAMES = (
    "labelSelector", "fieldSelector", "resourceVersion", "resourceVersionMatch", "limit", "continue", "dryRun",
    "fieldValidation", "sendInitialEvents", "propagationPolicy", "gracePeriodSeconds", "tailLines", "sinceTime",
    "container", "includeObject",
)  # fmt: skip
queries = st.dictionaries(
    st.sampled_from(QUERY_NAMES),
    st.text(max_size=12) | st.sampled_from(["0", "-1", "true", "All", "a=b", "a in (b)", "metadata.name=a"]),
    max_size=2,
)
KINDS = ("json", "yaml", "vnd.kubernetes.protobuf", "merge-patch+json", "json-patch+json", "strategic-merge-patch+json")
media = st.sampled_from([f"application/{kind}" for kind in KINDS])
operations = st.fixed_dictionaries(
    {"op": st.sampled_from(["add", "remove", "test", "move"]), "path": st.text(), "value": values}
)
bodies = (mutated() | values | st.lists(operations, max_size=2)).map(json.dumps) | st.binary(max_size=40) | st.none()


@settings(max_examples=settings().max_examples * 2, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]), paths, queries, media, bodies)
def test_any_request_gets_an_answer(
    api: Client, method: str, path: str, query: dict[str, str], kind: str, body: Any
) -> None:
    encoded = urlencode(query, errors="surrogatepass")
    with api.open(method, f"{path}?{encoded}", body, {"Content-Type": kind}, timeout=120) as response:
        data = response.read()
    # a real server, too, answers 500 to the scale of a job that has no workers, and 504 to a version of the future
    assert response.status < 500 or response.status == 504 or b"the spec replicas field" in data, data
    if response.status >= 400 and data != b"404 page not found\n":
        status = json.loads(data)
        assert (status["kind"], status["status"], status["code"]) == ("Status", "Failure", response.status)
        assert status["message"]


@pytest.mark.thorough
@settings(max_examples=settings().max_examples * 2, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_any_accepted_job_is_reconciled(api: Client, body: Any) -> None:
    """Controllers survive every accepted job; other jobs are refused with a reason."""
    answer = api("POST", JOBS, json.dumps(body))
    assert answer.status in (201, 400, 403, 409, 422), answer.data
    if answer.status == 201:
        path = f"{JOBS}/{answer.json['metadata']['name']}"
        api("PATCH", path, {"metadata": {"finalizers": None}}, {"Content-Type": "application/merge-patch+json"})
        assert api("DELETE", path).status in (200, 404)


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"values": ["n1", "n2"]}, "values: Required value: must be only one value when `operator` is 'In' or 'NotIn'"),
        ({"values": []}, "values: Required value"),
        ({"operator": "Exists"}, 'operator: Invalid value: "Exists": not a valid selector operator'),
        ({"key": "spec.unschedulable"}, 'key: Invalid value: "spec.unschedulable": not a valid field selector key'),
    ],
)
def test_match_fields_take_one_name_of_a_node(api: Client, field: dict[str, Any], why: str) -> None:
    """As in ValidateNodeFieldSelectorRequirement of Kubernetes' core/validation."""
    match = {"key": "metadata.name", "operator": "NotIn", "values": ["n1"], **field}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [match]}]}}
    spec = {"containers": [{"name": "c", "image": "none:1"}], "affinity": {"nodeAffinity": required}}
    answer = api("POST", PODS, {"metadata": {"name": "avoids"}, "spec": spec})
    assert answer.status == 422
    assert f"nodeSelectorTerms[0].matchFields[0].{why}" in answer.json["message"]
