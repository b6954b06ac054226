"""The fields of a training job's manifest, and the comparison of a manifest with them.

The table below holds the part of Kubernetes' and Kubeflow's schemas that people write by hand, in a short notation that
`schema_of` compiles to the JSON schema dialect of a CustomResourceDefinition. `compare` reads that dialect, so it also
takes the schema that a server publishes, which is complete. `scripts/pod_schema.py` compares the table with the models
of the Kubernetes client.

Notation: `field:type`, `!` after a required field; types s(tring), i(nteger), b(oolean), q(uantity: integer or
string), any, `A|B` one of these words, `[T]` list, `[T@key]` list whose entries differ in that key, `{T}` mapping, or a
name in the table.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.kinds.strategic_merge import member

Schema = Mapping[str, Any]

TYPES: dict[str, str] = {name: fields for kind in KINDS.values() for name, fields in kind.form.schema_types.items()} | {
    "RunPolicy": "cleanPodPolicy:s ttlSecondsAfterFinished:i activeDeadlineSeconds:i backoffLimit:i "
    "schedulingPolicy:SchedulingPolicy suspend:b managedBy:s",
    "SchedulingPolicy": "minAvailable:i queue:s minResources:{q} priorityClass:s scheduleTimeoutSeconds:i",
    "ReplicaSpec": "replicas:i template:PodTemplate restartPolicy:s",
    "PodTemplate": "metadata:Metadata spec:PodSpec",
    "Metadata": "name:s generateName:s namespace:s labels:{s} annotations:{s} finalizers:any ownerReferences:any uid:s "
    "resourceVersion:s generation:i creationTimestamp:any deletionTimestamp:any deletionGracePeriodSeconds:i "
    "managedFields:any selfLink:s",
    "PodSpec": "activeDeadlineSeconds:i affinity:Affinity automountServiceAccountToken:b containers!:[Container@name] "
    "dnsConfig:any dnsPolicy:s enableServiceLinks:b ephemeralContainers:any evictionResponders:any hostAliases:any "
    "hostIPC:b hostNetwork:b hostPID:b hostUsers:b hostname:s hostnameOverride:s imagePullSecrets:[ObjectName] "
    "initContainers:[Container@name] nodeName:s nodeSelector:{s} os:any overhead:{q} preemptionPolicy:s priority:i "
    "priorityClassName:s readinessGates:any resourceClaims:any resources:Resources restartPolicy:s runtimeClassName:s "
    "schedulerName:s schedulingGates:any schedulingGroup:any securityContext:PodSecurityContext serviceAccount:s "
    "serviceAccountName:s setHostnameAsFQDN:b shareProcessNamespace:b subdomain:s terminationGracePeriodSeconds:i "
    "tolerations:[Toleration] topologySpreadConstraints:any volumes:[Volume@name]",
    "ObjectName": "name:s",
    "Container": "args:[s] command:[s] env:[EnvVar@name] envFrom:[EnvFrom] image:s "
    "imagePullPolicy:Always|IfNotPresent|Never lifecycle:any livenessProbe:Probe name!:s ports:[Port] "
    "readinessProbe:Probe resizePolicy:any resources:Resources "
    "restartPolicy:s restartPolicyRules:any securityContext:SecurityContext startupProbe:Probe stdin:b stdinOnce:b "
    "terminationMessagePath:s terminationMessagePolicy:s tty:b volumeDevices:any volumeMounts:[VolumeMount@mountPath] "
    "workingDir:s",
    "EnvVar": "name!:s value:s valueFrom:EnvSource",
    "EnvSource": "configMapKeyRef:KeyRef secretKeyRef:KeyRef fieldRef:FieldRef resourceFieldRef:any fileKeyRef:any",
    "KeyRef": "name:s key!:s optional:b",
    "FieldRef": "apiVersion:s fieldPath!:s",
    "EnvFrom": "prefix:s configMapRef:OptionalName secretRef:OptionalName",
    "OptionalName": "name:s optional:b",
    "Port": "containerPort!:i hostIP:s hostPort:i name:s protocol:s",
    "Resources": "limits:{q} requests:{q} claims:any",
    "VolumeMount": "bindMountOptions:[s] mountPath!:s mountPropagation:s name!:s readOnly:b recursiveReadOnly:s "
    "subPath:s subPathExpr:s",
    "SecurityContext": "allowPrivilegeEscalation:b appArmorProfile:any capabilities:Capabilities privileged:b "
    "procMount:s readOnlyRootFilesystem:b runAsGroup:i runAsNonRoot:b runAsUser:i seLinuxOptions:any "
    "seccompProfile:any windowsOptions:any",
    "Capabilities": "add:[s] drop:[s]",
    "PodSecurityContext": "appArmorProfile:any fsGroup:i fsGroupChangePolicy:s runAsGroup:i runAsNonRoot:b runAsUser:i "
    "seLinuxChangePolicy:s seLinuxOptions:any seccompProfile:any supplementalGroups:[i] supplementalGroupsPolicy:s "
    "sysctls:any windowsOptions:any",
    "Probe": "exec:any failureThreshold:i grpc:any httpGet:any initialDelaySeconds:i periodSeconds:i "
    "successThreshold:i tcpSocket:any terminationGracePeriodSeconds:i timeoutSeconds:i",
    "Toleration": "effect:s key:s operator:s tolerationSeconds:i value:s",
    "Affinity": "nodeAffinity:NodeAffinity podAffinity:any podAntiAffinity:any",
    "NodeAffinity": "requiredDuringSchedulingIgnoredDuringExecution:NodeSelector "
    "preferredDuringSchedulingIgnoredDuringExecution:any",
    "NodeSelector": "nodeSelectorTerms!:[NodeSelectorTerm]",
    "NodeSelectorTerm": "matchExpressions:[Requirement] matchFields:[Requirement]",
    "Requirement": "key!:s operator!:s values:[s]",
    "Volume": "name!:s configMap:ConfigMapVolume downwardAPI:any emptyDir:EmptyDir ephemeral:any hostPath:HostPath "
    "persistentVolumeClaim:Claim projected:any secret:SecretVolume nfs:Nfs csi:any image:any fc:any flexVolume:any "
    "iscsi:any rbd:any cephfs:any glusterfs:any cinder:any azureDisk:any azureFile:any awsElasticBlockStore:any "
    "gcePersistentDisk:any gitRepo:any flocker:any photonPersistentDisk:any portworxVolume:any quobyte:any scaleIO:any "
    "storageos:any vsphereVolume:any",
    "ConfigMapVolume": "name:s defaultMode:i defaultUser:i items:any optional:b",
    "SecretVolume": "secretName:s defaultMode:i defaultUser:i items:any optional:b",
    "EmptyDir": "medium:s mode:i sizeLimit:q",
    "HostPath": "path!:s type:s",
    "Claim": "claimName!:s readOnly:b",
    "Nfs": "server!:s path!:s readOnly:b",
}
PLACES = {
    "Container": "in a container",
    "PodSpec": "in the pod's spec, beside containers",
    "ReplicaSpec": "in the replica's spec, beside template",
    "RunPolicy": "under spec.runPolicy",
    "ElasticPolicy": "under spec.elasticPolicy",
    "Resources": "under the container's resources",
    "SecurityContext": "under the container's securityContext",
}  #: Types that a misplaced field may belong to, and a description of their place.
PLACES_WITH_RUNTIME = {
    "TrainJobSpec": "under spec",
    "Trainer": "under spec.trainer",
    "PodPatchSpec": "in the pod's spec of a runtimePatches entry",
    "ContainerPatch": "in a container of a runtimePatches entry",
}  #: Places of such fields in jobs whose pod templates are in a runtime.

_SCALARS: dict[str, Schema] = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "b": {"type": "boolean"},
    "q": {"x-kubernetes-int-or-string": True},
    "any": {"x-kubernetes-preserve-unknown-fields": True},
}


@dataclass(frozen=True)
class Mismatch:
    """One place where a value doesn't match its schema. `code` is unknown, type, value, missing or duplicate."""

    code: str
    path: str
    found: str
    expected: str
    hint: str = ""


def schema_of(kind: str, version: str) -> Schema:
    """The schema of a kind (`MPIJob`) in a version (`v1`), from the table."""
    return compiled(root if (root := f"{kind}/{version}") in TYPES else kind)


def published(document: Mapping[str, Any], kind: str, api_version: str) -> Schema | None:
    """The schema of a kind in what a server publishes at `/openapi/v3/apis/<group>/<version>`, or None."""
    group, _, version = api_version.rpartition("/")
    gvk = {"group": group, "version": version, "kind": kind}
    for name, schema in ((document.get("components") or {}).get("schemas") or {}).items():
        if gvk in (schema.get("x-kubernetes-group-version-kind") or ()):
            return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return None


def spec_fields(schema: Schema) -> frozenset[str]:
    """The fields of `spec` in the schema of a kind, as `published` returns it or as a CRD has it."""
    spec = _resolved((_resolved(schema, schema).get("properties") or {}).get("spec") or {}, schema)
    return frozenset(spec.get("properties") or ())


@functools.cache
def compiled(name: str) -> Schema:
    """The schema of a type, by its name in the tables of this module."""
    if name in _SCALARS:
        return _SCALARS[name]
    if name.startswith("["):
        inner, _, key = name[1:-1].partition("@")
        return {"type": "array", "items": compiled(inner)} | ({"x-kubernetes-list-map-keys": [key]} if key else {})
    if name.startswith("{"):
        return {"type": "object", "additionalProperties": compiled(name[1:-1])}
    if "|" in name:
        return {"type": "string", "enum": name.split("|")}
    fields = [field.partition(":")[::2] for field in TYPES[name].split()]
    return {
        "type": "object",
        "title": name,
        "properties": {key.rstrip("!"): compiled(type_) for key, type_ in fields},
        "required": [key[:-1] for key, _ in fields if key.endswith("!")],
    }


def compare(value: Any, schema: Schema, path: str = "$", root: Schema | None = None) -> Iterator[Mismatch]:
    """Where a value doesn't match its schema. Null counts as missing, as the API server prunes it.

    :param root: the document in which `$ref`s (`#/components/schemas/...`) are resolved. Default: the schema itself.
    """
    root = schema if root is None else root
    schema = _resolved(schema, root)
    if value is None:
        return
    wrong = _type_mismatch(value, schema, path)
    if wrong:
        yield wrong
    elif schema.get("enum") and value not in schema["enum"]:
        near = difflib.get_close_matches(str(value), schema["enum"], n=1)
        yield Mismatch("value", path, _shown(value), " or ".join(schema["enum"]), *(f"did you mean {n}?" for n in near))
    elif isinstance(value, dict):
        yield from _compare_mapping(value, schema, path, root)
    elif isinstance(value, list):
        yield from _duplicates(value, schema, path)
        for i, item in enumerate(value):
            yield from compare(item, schema.get("items") or {}, f"{path}[{i}]", root)


def undescribed(
    value: Any, schema: Schema, own: Schema, path: str = "$", root: Schema | None = None
) -> Iterator[tuple[Any, Schema, str]]:
    """The parts of a value of which a published schema says nothing, each with our schema of it, and its path.

    :param own: our schema of the value.
    :param root: see `compare`. Default: the published schema itself.
    """
    root = schema if root is None else root
    schema = _resolved(schema, root)
    of_fields = schema.get("properties") or {}
    of_others, of_items = schema.get("additionalProperties"), schema.get("items")
    if isinstance(value, dict):
        if not of_fields and not isinstance(of_others, Mapping):
            yield value, own, path
            return
        for key, inner in value.items():
            published = of_fields.get(key, of_others)
            ours = (own.get("properties") or {}).get(key, own.get("additionalProperties"))
            if isinstance(published, Mapping) and isinstance(ours, Mapping):
                yield from undescribed(inner, published, ours, member(path, key), root)
    elif isinstance(value, list) and isinstance(own.get("items"), Mapping):
        if not of_items:
            yield value, own, path
            return
        for i, item in enumerate(value):
            yield from undescribed(item, of_items, own["items"], f"{path}[{i}]", root)


def _compare_mapping(value: dict[str, Any], schema: Schema, path: str, root: Schema) -> Iterator[Mismatch]:
    properties: Mapping[str, Schema] = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    for key, inner in value.items():
        if key in properties:
            yield from compare(inner, properties[key], member(path, key), root)
        elif isinstance(others, Mapping):
            yield from compare(inner, others, member(path, key), root)
        elif (
            inner is not None
            and properties
            and not schema.get("x-kubernetes-preserve-unknown-fields")
            and others is not True
        ):
            yield Mismatch("unknown", member(path, key), "", "", _meant(key, properties, root))
    for key in schema.get("required") or ():
        if value.get(key) is None:
            yield Mismatch("missing", member(path, key), "nothing", _described(properties.get(key) or {}))


def _type_mismatch(value: Any, schema: Schema, path: str) -> Mismatch | None:
    if schema.get("x-kubernetes-int-or-string"):
        fits, expected = _FITS["integer"](value) or isinstance(value, str), "an integer or text"
    else:
        expected_type = schema.get("type")
        fits, expected = _FITS.get(str(expected_type), lambda _: True)(value), _described(schema)
    if fits:
        return None
    found = repr(_shown(value)) if isinstance(value, str) else _shown(value)  # '2' is text, 2 is a number
    return Mismatch("type", path, found, expected, _advice(value, schema))


_FITS = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer()),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
}
_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
}


def _described(schema: Schema) -> str:
    return (
        "an integer or text" if schema.get("x-kubernetes-int-or-string") else _WORDS.get(str(schema.get("type")), "it")
    )


def _advice(value: Any, schema: Schema) -> str:
    expected_type = schema.get("type")
    if expected_type == "string" or schema.get("x-kubernetes-int-or-string"):
        return "" if isinstance(value, dict | list) else f'quote it: "{_shown(value)}"'
    if expected_type in ("integer", "boolean") and isinstance(value, str):
        return "write it without quotes"
    if (
        expected_type == "array"
        and isinstance(value, dict)
        and "name" in ((schema.get("items") or {}).get("properties") or {})
    ):
        return "write each entry as an item of a list: `- name: ...`"
    if expected_type == "array" and not isinstance(value, dict):
        words = '["sh", "-c", ...]' if " " in str(value) else f"[{_shown(value)}]"
        return f"write it as a list: {words}"
    return ""


def _duplicates(items: list[Any], schema: Schema, path: str) -> Iterator[Mismatch]:
    keys = schema.get("x-kubernetes-list-map-keys") or ()
    first: dict[tuple[str, ...], int] = {}
    for i, item in enumerate(items):
        if not keys or not isinstance(item, dict) or not all(isinstance(item.get(k), str) for k in keys):
            continue
        identity = tuple(item[k] for k in keys)
        if identity in first:
            shown = ", ".join(f"{k} {v}" for k, v in zip(keys, identity, strict=True))
            yield Mismatch("duplicate", f"{path}[{i}]", f"{shown} again", f"once: also at {path}[{first[identity]}]")
        first.setdefault(identity, i)


def _meant(key: str, properties: Mapping[str, Schema], root: Schema) -> str:
    if "/" in key and "limits" in properties:
        return "write an extended resource under resources.limits"
    near = next((p for p in properties if p.lower() == key.lower().replace("_", "").replace("-", "")), None)
    near = near or next(iter(difflib.get_close_matches(key, properties, n=1, cutoff=0.75)), None)
    longer = [p for p in properties if p.startswith(key)]
    near = near or (longer[0] if len(longer) == 1 else None)  # resources: resourcesPerNode
    if near:
        return f"did you mean `{near}`?"
    known_places = PLACES_WITH_RUNTIME if "runtimeRef" in spec_fields(root) else PLACES
    places = [place for name, place in known_places.items() if re.search(rf"(^| ){re.escape(key)}!?:", TYPES[name])]
    return f"`{key}` belongs {' or '.join(places)}" if places else ""


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Follow `$ref`, and `allOf` with one member, as OpenAPI v3 documents of Kubernetes write them."""
    for _ in range(10):
        inner = schema.get("allOf")
        if isinstance(inner, list) and len(inner) == 1:
            schema = inner[0]
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        schema = functools.reduce(lambda node, key: node.get(key) or {}, reference.lstrip("#/").split("/"), root)
    return schema


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
