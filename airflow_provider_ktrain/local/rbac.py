"""Who asks, and whether they may: bearer tokens, Roles and ClusterRoles, reviews that tell callers of themselves."""

from __future__ import annotations

import datetime
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.requestinfo import RequestInfo
from airflow_provider_ktrain.local.store import Obj, Store, now

ADMINS = "system:masters"
DEFAULT_LIFETIME = 3600  # seconds a token of a service account is good for
POD_LIFETIME = 365 * 86400  # seconds: tokens in pods are not rotated here

#: what anybody may read, and what everybody with an account may
PUBLIC = {"verbs": ["get"], "nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version", "/version/"]}
DISCOVERY = {
    "verbs": ["get"],
    "nonResourceURLs": [
        "/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz", "/version",
        "/version/",
    ],
}  # fmt: skip
SELF_REVIEWS = (
    {
        "verbs": ["create"],
        "apiGroups": ["authorization.k8s.io"],
        "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"],
    },
    {"verbs": ["create"], "apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"]},
)
EVERYTHING = (
    {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
    {"verbs": ["*"], "nonResourceURLs": ["*"]},
)
ATTRIBUTES = ("group", "version", "namespace", "resource", "name", "subresource")
READ = ["get", "list", "watch"]
WRITE = ["create", "delete", "deletecollection", "patch", "update"]
WORKLOADS = [
    {"apiGroups": [""], "resources": ["configmaps", "events", "pods", "pods/log", "pods/status", "services"]},
    {"apiGroups": ["batch"], "resources": ["jobs", "jobs/status"]},
    {"apiGroups": ["kubeflow.org"], "resources": ["*"]},
]
CLUSTER_ROLES = {
    "cluster-admin": list(EVERYTHING),
    "edit": [{"verbs": READ + WRITE, **rule} for rule in WORKLOADS]
    + [{"verbs": READ + WRITE, "apiGroups": [""], "resources": ["secrets", "serviceaccounts", "pods/exec"]}],
    "view": [{"verbs": READ, **rule} for rule in WORKLOADS],
}


@dataclass(frozen=True)
class User:
    """An account as a review shows it."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    credential: str = ""

    @property
    def info(self) -> Obj:
        info: Obj = {"username": self.name, **({"uid": self.uid} if self.uid else {}), "groups": list(self.groups)}
        if self.credential:
            info["extra"] = {"authentication.kubernetes.io/credential-id": [self.credential]}
        return info


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))
ADMIN = User("kubernetes-admin", (ADMINS, "system:authenticated"))


class Authenticator:
    """Bearer tokens: the admin's, and those given to service accounts, good while the account is the same one."""

    def __init__(self, store: Store, admin_token: str) -> None:
        self._store = store
        self._admin_token = admin_token
        self._issued: dict[str, tuple[str, str, User, float]] = {}  # namespace, name, user, expiry

    def user(self, authorization: str | None) -> User:
        """The user of an Authorization header; ApiError 401 where the token is no good."""
        if not authorization:
            return ANONYMOUS
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return ANONYMOUS
        if secrets.compare_digest(token.encode(), self._admin_token.encode()):
            return ADMIN
        namespace, name, user, expiry = self._issued.get(token, ("", "", ANONYMOUS, 0.0))
        account = self._store.find(r.SERVICE_ACCOUNT, namespace, name)
        if expiry < time.time() or account is None or account["metadata"]["uid"] != user.uid:
            raise ApiError(401, "Unauthorized")
        return user

    def account_token(self, namespace: str, name: str) -> str:
        """A token for a pod of that service account."""
        account = self._store.get(r.SERVICE_ACCOUNT, namespace, name)
        return str(self.issue(account, {"spec": {"expirationSeconds": POD_LIFETIME}})["status"]["token"])

    def issue(self, account: Obj, request: Obj) -> Obj:
        """The answer to a TokenRequest for a service account."""
        namespace, name = account["metadata"]["namespace"], account["metadata"]["name"]
        spec = request.get("spec") or {}
        seconds = spec.get("expirationSeconds") or DEFAULT_LIFETIME
        if not isinstance(seconds, int) or seconds < 600:
            raise ApiError(
                422, f'TokenRequest.authentication.k8s.io "{name}" is invalid: spec.expirationSeconds: Invalid value: '
                f"{seconds}: may not specify a duration less than 10 minutes",
            )  # fmt: skip
        user = User(
            f"system:serviceaccount:{namespace}:{name}",
            ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"),
            account["metadata"]["uid"],
            f"JTI={uuid.uuid4()}",
        )
        token, expiry = secrets.token_urlsafe(32), time.time() + seconds
        self._issued = {t: i for t, i in self._issued.items() if i[3] > time.time()}
        self._issued[token] = (namespace, name, user, expiry)
        until = datetime.datetime.fromtimestamp(expiry, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": name, "namespace": namespace, "creationTimestamp": now()},
            "spec": {
                "audiences": spec.get("audiences") or ["https://kubernetes.default.svc"],
                "expirationSeconds": seconds,
                "boundObjectRef": None,
            },
            "status": {"token": token, "expirationTimestamp": until},
        }


class Authorizer:
    """Rules of Roles and ClusterRoles, as bound in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, user: User, info: RequestInfo) -> None:
        """ApiError 403 where the user may not do that."""
        if not self.allows(user, info):
            raise forbidden(user, info)

    def allows(self, user: User, info: RequestInfo) -> bool:
        return any(covers(rule, info) for rule in self.rules(user, info.namespace))

    def rules(self, user: User, namespace: str) -> Iterator[Obj]:
        """The rules that hold for a user in a namespace, or "" for the whole cluster."""
        if ADMINS in user.groups:
            yield from EVERYTHING
        if "system:authenticated" in user.groups:
            yield from SELF_REVIEWS
            yield DISCOVERY
        yield PUBLIC
        for binding in self._store.list(r.CLUSTER_ROLE_BINDING):
            if _binds(binding, user, ""):
                yield from self._role(binding["roleRef"], "")
        for binding in self._store.list(r.ROLE_BINDING, namespace) if namespace else ():
            if _binds(binding, user, namespace):
                yield from self._role(binding["roleRef"], namespace)

    def _role(self, ref: Obj, namespace: str) -> Iterable[Obj]:
        resource = r.ROLE if ref.get("kind") == "Role" else r.CLUSTER_ROLE
        role = self._store.find(resource, namespace if resource == r.ROLE else None, str(ref.get("name")))
        return (role or {}).get("rules") or ()


def _binds(binding: Obj, user: User, namespace: str) -> bool:
    for subject in binding.get("subjects") or ():
        name = subject.get("name")
        if subject.get("kind") == "ServiceAccount":
            name = f"system:serviceaccount:{subject.get('namespace') or namespace}:{name}"
        if name in (user.groups if subject.get("kind") == "Group" else (user.name,)):
            return True
    return False


def covers(rule: Obj, info: RequestInfo) -> bool:
    """Whether one rule of a role allows a request."""
    if not _among(info.verb, rule.get("verbs")):
        return False
    if not info.plural:
        return any(
            url in ("*", info.path) or (url.endswith("*") and info.path.startswith(url[:-1]))
            for url in rule.get("nonResourceURLs") or ()
        )
    names = rule.get("resourceNames") or ()
    return (
        _among(info.group, rule.get("apiGroups"))
        and (
            _among(info.resource_path, rule.get("resources"))
            or f"*/{info.subresource}" in (rule.get("resources") or ())
        )
        and (not names or info.name in names)
    )


def _among(value: str, allowed: Iterable[str] | None) -> bool:
    return allowed is not None and any(a in ("*", value) for a in allowed)


def forbidden(user: User, info: RequestInfo) -> ApiError:
    """403 as worded for a path or for a resource."""
    if not info.plural:
        return ApiError(403, f'forbidden: User "{user.name}" cannot {info.verb} path "{info.path}"', details={})
    what = f"{info.plural}.{info.group}" if info.group else info.plural
    where = f'in the namespace "{info.namespace}"' if info.namespace else "at the cluster scope"
    named = f'{what} "{info.name}"' if info.name else what
    return ApiError(
        403,
        f'{named} is forbidden: User "{user.name}" cannot {info.verb} resource "{info.resource_path}" in API group '
        f'"{info.group}" {where}',
        details={
            **({"name": info.name} if info.name else {}),
            **({"group": info.group} if info.group else {}),
            "kind": info.plural,
        },
    )


class Reviews:
    """The resources that exist only as a question and its answer."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        self.kinds = {
            ("authorization.k8s.io", "v1", "selfsubjectaccessreviews"): ("SelfSubjectAccessReview", self._access),
            ("authorization.k8s.io", "v1", "selfsubjectrulesreviews"): ("SelfSubjectRulesReview", self._rules),
            ("authentication.k8s.io", "v1", "selfsubjectreviews"): ("SelfSubjectReview", self._self),
        }

    def answer(self, user: User, info: RequestInfo, question: Obj) -> Obj | None:
        """The answered review, or None where the path is not one."""
        found = self.kinds.get((info.group, info.version, info.plural))
        if found is None:
            return None
        kind, answer = found
        head = {"kind": kind, "apiVersion": f"{info.group}/{info.version}", "metadata": {}}
        return {**head, **answer(user, question.get("spec") or {})}

    def _access(self, user: User, spec: Obj) -> Obj:
        wanted, path = spec.get("resourceAttributes") or {}, spec.get("nonResourceAttributes") or {}
        group, version, namespace, plural, name, subresource = (str(wanted.get(a) or "") for a in ATTRIBUTES)
        verb = str(wanted.get("verb") or path.get("verb") or "")
        asked = RequestInfo(verb, str(path.get("path", "")), group, version, namespace, plural, name, subresource)
        return {"spec": spec, "status": {"allowed": self._authorizer.allows(user, asked)}}

    def _rules(self, user: User, spec: Obj) -> Obj:
        rules = list(self._authorizer.rules(user, str(spec.get("namespace") or "")))
        return {
            "spec": {},
            "status": {
                "resourceRules": [rule for rule in rules if "nonResourceURLs" not in rule],
                "nonResourceRules": [rule for rule in rules if "nonResourceURLs" in rule],
                "incomplete": False,
            },
        }

    def _self(self, user: User, spec: Obj) -> Obj:
        return {"metadata": {"creationTimestamp": now()}, "status": {"userInfo": user.info}}


def bootstrap(store: Store) -> None:
    """The ClusterRoles that every cluster has."""
    for name, rules in CLUSTER_ROLES.items():
        store.create(r.CLUSTER_ROLE, {"metadata": {"name": name}, "rules": rules})
    store.create(
        r.CLUSTER_ROLE_BINDING,
        {
            "metadata": {"name": "cluster-admin"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": ADMINS}],
        },
    )
