"""Authentication and authorization: bearer tokens, Roles and ClusterRoles, and the self-subject reviews."""

from __future__ import annotations

import datetime
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ktrain_embedded.apiserver.requestinfo import RequestInfo
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects import schema
from ktrain_embedded.objects.errors import ApiError, invalid
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store, now

DEFAULT_LIFETIME = 3600  # seconds that a token of a service account is valid
AUDIENCE = "https://kubernetes.default.svc"  # audience of tokens for the API server
POD_LIFETIME = 365 * 86400  # seconds: the embedded cluster doesn't rotate tokens in pods

#: Rules by group that apply without a binding, as in the default ClusterRoles of Kubernetes.
SYSTEM_RULES: dict[str, list[Obj]] = {
    "system:masters": [
        {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
        {"verbs": ["*"], "nonResourceURLs": ["*"]},
    ],
    "system:authenticated": [
        {"verbs": ["create"], "apiGroups": ["authorization.k8s.io"],
         "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"]},
        {"verbs": ["create"], "apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"]},
        {"verbs": ["get"],
         "nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*",
                             "/readyz", "/version", "/version/"]},
    ],
    "system:unauthenticated": [
        {"verbs": ["get"], "nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version", "/version/"]},
    ],
}  # fmt: skip


@dataclass(frozen=True)
class User:
    """The user of a request. `credential` is the id of a service account's token."""

    name: str
    groups: tuple[str, ...]
    uid: str = ""
    credential: str = ""


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))
ADMIN = User("kubernetes-admin", ("system:masters", "system:authenticated"))


class Authenticator:
    """Authenticate the admin's certificate, and bearer tokens of the admin and of service accounts.

    A service account's token is valid while the account has the same uid.
    """

    def __init__(self, store: Store, admin_token: str) -> None:
        self._store = store
        self._admin_token = admin_token
        #: The user, the expiry (Unix time) and the audiences of each token.
        self._issued: dict[str, tuple[User, float, tuple[str, ...]]] = {}

    def user(self, authorization: str | None, certificate: object) -> User:
        """Return the user of a client certificate, which TLS has verified, or else of an Authorization header.

        :raises ApiError: 401 if the token is invalid.
        """
        if certificate:  # only the admin has one
            return ADMIN
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return ANONYMOUS
        if secrets.compare_digest(token.encode(), self._admin_token.encode()):
            return ADMIN
        if not self.valid(token, AUDIENCE):
            raise ApiError(401, "Unauthorized")
        return self._issued[token][0]

    def valid(self, token: str, audience: str) -> bool:
        """Whether a service account's token is valid for an audience. The account must still have the same uid."""
        user, expiry, audiences = self._issued.get(token, (ANONYMOUS, 0.0, ()))
        namespace, name = user.name.split(":")[-2:]
        account = self._store.find(r.SERVICE_ACCOUNT, namespace, name)
        same = account is not None and account["metadata"]["uid"] == user.uid
        return same and expiry >= time.time() and audience in audiences

    def account_token(self, namespace: str, name: str, audience: str = "") -> str:
        """Issue a token for a pod of that service account. `audience` is "" for the API server."""
        account = self._store.get(r.SERVICE_ACCOUNT, namespace, name)
        spec = {"expirationSeconds": POD_LIFETIME, **({"audiences": [audience]} if audience else {})}
        return str(self.issue(account, {"spec": spec})["status"]["token"])

    def issue(self, account: Obj, request: Obj) -> Obj:
        """Return the response to a TokenRequest for a service account.

        :raises ApiError: 400 or 422 if the request is invalid.
        """
        request, _ = schema.decode(TOKEN_REQUEST, request)
        namespace, name = account["metadata"]["namespace"], account["metadata"]["name"]
        spec = request.get("spec") or {}
        seconds = spec.get("expirationSeconds") or DEFAULT_LIFETIME
        if not 600 <= seconds <= 2**32:
            why = "less than 10 minutes" if seconds < 600 else "larger than 2^32 seconds"
            problem = f"Invalid value: {seconds}: may not specify a duration {why}"
            wrong = [("FieldValueInvalid", problem, "spec.expirationSeconds")]
            raise invalid(TOKEN_REQUEST.kind, wrong, name, TOKEN_REQUEST.group)
        user = User(
            f"system:serviceaccount:{namespace}:{name}",
            ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"),
            account["metadata"]["uid"],
            f"JTI={uuid.uuid4()}",
        )
        token, expiry = secrets.token_urlsafe(32), time.time() + seconds
        until = datetime.datetime.fromtimestamp(expiry, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        audiences = spec.get("audiences") or [AUDIENCE]
        self._issued[token] = user, expiry, tuple(audiences)
        return {
            **request,
            "metadata": {"name": name, "namespace": namespace, "creationTimestamp": now()},
            "spec": {"audiences": audiences, "expirationSeconds": seconds, "boundObjectRef": None},
            "status": {"token": token, "expirationTimestamp": until},
        }


class Authorizer:
    """Authorize requests with the Roles, ClusterRoles and bindings in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, user: User, info: RequestInfo) -> None:
        """Raise ApiError 403 if the user isn't allowed to send the request."""
        if not self.allows(user, info):
            raise forbidden(user, info)

    def allows(self, user: User, info: RequestInfo) -> bool:
        """Whether a rule of one of the user's roles allows the request."""
        return any(covers(rule, info) for rule in self.rules(user, info.namespace))

    def rules(self, user: User, namespace: str) -> Iterator[Obj]:
        """Yield the rules that apply to a user in a namespace, or in the whole cluster if `namespace` is ""."""
        for group, rules in SYSTEM_RULES.items():
            if group in user.groups:
                yield from rules
        bindings = self._store.list(r.ROLE_BINDING, namespace) if namespace else []
        for binding in (*self._store.list(r.CLUSTER_ROLE_BINDING), *bindings):
            where, ref = binding["metadata"].get("namespace", ""), binding["roleRef"]
            if any(_is(user, subject, where) for subject in binding.get("subjects", ())):
                place = (r.ROLE, where) if ref["kind"] == "Role" else (r.CLUSTER_ROLE, None)
                yield from (self._store.find(place[0], place[1], ref["name"]) or {}).get("rules", ())


def _is(user: User, subject: Obj, namespace: str) -> bool:
    """Whether a subject of a binding in that namespace is the user or one of the user's groups."""
    kind, name = subject.get("kind"), subject.get("name")
    if kind == "ServiceAccount":
        name = f"system:serviceaccount:{subject.get('namespace', namespace)}:{name}"
    return name in (user.groups if kind == "Group" else (user.name,))


def covers(rule: Obj, info: RequestInfo) -> bool:
    """Whether a rule of a role allows a request."""
    if not _among(info.verb, rule.get("verbs")):
        return False
    if not info.plural:
        return any(
            url in ("*", info.path) or (url.endswith("*") and info.path.startswith(url[:-1]))
            for url in rule.get("nonResourceURLs", ())
        )
    names = rule.get("resourceNames") or [info.name]
    groups, resources = rule.get("apiGroups"), rule.get("resources")
    return _among(info.group, groups) and _among(info.resource_path, resources) and info.name in names


def _among(value: str, allowed: Iterable[str] | None) -> bool:
    return bool({"*", value}.intersection(allowed or ()))


def forbidden(user: User, info: RequestInfo) -> ApiError:
    """Return the API server's error 403 for a request to a path or a resource."""
    if not info.plural:
        return ApiError(403, f'forbidden: User "{user.name}" cannot {info.verb} path "{info.path}"', details={})
    what = f"{info.plural}.{info.group}" if info.group else info.plural
    where = f'in the namespace "{info.namespace}"' if info.namespace else "at the cluster scope"
    named = f'{what} "{info.name}"' if info.name else what
    details = {"name": info.name, "group": info.group, "kind": info.plural}
    return ApiError(
        403,
        f'{named} is forbidden: User "{user.name}" cannot {info.verb} resource "{info.resource_path}" in API group '
        f'"{info.group}" {where}',
        details={key: value for key, value in details.items() if value},
    )


#: Resources that are not stored: the response to a create request contains the result.
ACCESS_REVIEW, RULES_REVIEW, SUBJECT_REVIEW, TOKEN_REQUEST = (
    Resource(f"{group}.k8s.io", "v1", kind, f"{kind.lower()}s", namespaced=False, verbs=("create",))
    for group, kind in (
        ("authorization", "SelfSubjectAccessReview"), ("authorization", "SelfSubjectRulesReview"),
        ("authentication", "SelfSubjectReview"), ("authentication", "TokenRequest"),
    )
)  # fmt: skip


class Reviews:
    """Answer the reviews of the user who sends the request: SelfSubjectAccessReview and similar kinds."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        answers = {ACCESS_REVIEW: self._access, RULES_REVIEW: self._rules, SUBJECT_REVIEW: self._self}
        self.kinds = {(x.group, x.version, x.plural): (x, answer) for x, answer in answers.items()}

    def answer(self, user: User, info: RequestInfo, question: Obj) -> Obj:
        """Return the review with its status. Raise ApiError 400 if the review is invalid."""
        resource, answer = self.kinds[info.group, info.version, info.plural]
        review, _ = schema.decode(resource, question)
        return {**review, "metadata": {}, **answer(user, review.get("spec") or {})}

    def _access(self, user: User, spec: Obj) -> Obj:
        attributes = spec.get("resourceAttributes") or spec.get("nonResourceAttributes") or {}
        keys = ("verb", "path", "group", "version", "namespace", "resource", "name", "subresource")
        reviewed = RequestInfo(*(attributes.get(key, "") for key in keys))
        return {"status": {"allowed": self._authorizer.allows(user, reviewed)}}

    def _rules(self, user: User, spec: Obj) -> Obj:
        rules = list(self._authorizer.rules(user, spec.get("namespace", "")))
        status = {
            "resourceRules": [rule for rule in rules if "nonResourceURLs" not in rule],
            "nonResourceRules": [rule for rule in rules if "nonResourceURLs" in rule],
            "incomplete": False,
        }
        return {"spec": {}, "status": status}

    def _self(self, user: User, spec: Obj) -> Obj:
        info: Obj = {"username": user.name, "uid": user.uid, "groups": list(user.groups)}
        if user.credential:
            info["extra"] = {"authentication.kubernetes.io/credential-id": [user.credential]}
        return {"metadata": {"creationTimestamp": now()}, "status": {"userInfo": info}}
