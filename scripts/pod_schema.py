"""Compares the table of Kubernetes' pod schema in `core/manifest/schema.py` with the models of the Kubernetes client.

    python scripts/pod_schema.py

`make lint` runs it with the installed client, the newest one that Airflow's provider cncf-kubernetes allows. It fails
if a field is missing, is no field of the model, or differs in its type or in whether it is required. The table is
compared from the pod template down, as far as it names types; `any` matches everything. It has the fields of the
newest client, too, which can be installed elsewhere:

    pip install --no-deps --target /tmp/newest kubernetes && PYTHONPATH=/tmp/newest python scripts/pod_schema.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a script

import kubernetes  # noqa: E402
from kubernetes.client import Configuration, models  # noqa: E402

from airflow_provider_ktrain.core.manifest.schema import TYPES  # noqa: E402

#: Types of the table, and the types of the client that they stand for.
SCALARS = {
    "s": ("str",), "i": ("int",), "b": ("bool",), "q": ("str", "object"), "{s}": ("dict[str, str]",),
    "{q}": ("dict[str, str]",),
}  # fmt: skip
#: Fields that only version 37 of the client has, which cncf-kubernetes doesn't allow yet.
NEWER = frozenset({
    "PodSpec.evictionResponders", "VolumeMount.bindMountOptions", "EmptyDir.mode", "ConfigMapVolume.defaultUser",
    "SecretVolume.defaultUser",
})  # fmt: skip


def compare(types: dict[str, str], name: str, model: str, seen: set[tuple[str, str]]) -> Iterator[str]:
    """What differs between a type of the table and a model, and between the types of their fields.

    :param seen: the pairs that are compared already.
    """
    if (name, model) in seen:
        return
    seen.add((name, model))
    cls = getattr(models, model, None)
    if cls is None or name not in types:
        yield f"{name} is compared with {model}, but {'the client' if cls is None else 'the table'} has no such type"
        return
    known = {key: cls.openapi_types[attribute] for attribute, key in cls.attribute_map.items()}
    required = _required(cls)
    fields = dict(field.split(":") for field in types[name].split())
    found = {field.removesuffix("!"): (type_, field.endswith("!")) for field, type_ in fields.items()}
    yield from (f"{name} lacks {key}, a field of {model}: {known[key]}" for key in known if key not in found)
    for key, (type_, is_required) in found.items():
        if key not in known:
            if f"{name}.{key}" not in NEWER:
                yield f"{name}.{key} is no field of {model}"
            continue
        if is_required != (key in required):
            yield f"{name}.{key} is {'optional' if is_required else 'required'} in {model}"
        yield from _compare_type(types, f"{name}.{key}", type_, known[key], seen)


def _compare_type(
    types: dict[str, str], where: str, type_: str, client_type: str, seen: set[tuple[str, str]]
) -> Iterator[str]:
    client_type = re.sub(r"^dict\((.*)\)$", r"dict[\1]", client_type)  # dict(str, str) in version 35 of the client
    client_type = re.sub(r"List|Dict", lambda match: match[0].lower(), client_type)  # List[str] in version 37
    item = re.fullmatch(r"\[(\w+)(?:@\w+)?\]", type_)
    of_client = re.fullmatch(r"list\[(\w+)\]", client_type)
    if item and of_client:
        yield from _compare_type(types, where, item[1], of_client[1], seen)
    elif type_ in types:
        yield from compare(types, type_, client_type, seen)
    elif type_ != "any" and client_type not in SCALARS.get("s" if "|" in type_ else type_, ()):
        yield f"{where} is {type_} in the table, and {client_type} in the client"


def _required(cls: Any) -> set[str]:
    """The fields that a model requires: before version 37 of the client, their setters reject None."""
    if hasattr(cls, "model_fields"):
        return {of.serialization_alias or name for name, of in cls.model_fields.items() if of.is_required()}
    blank, found = cls.__new__(cls), set[str]()
    blank.local_vars_configuration = Configuration()
    for attribute, key in cls.attribute_map.items():
        try:
            setattr(blank, attribute, None)
        except ValueError:
            found.add(key)
    return found


def findings(types: dict[str, str] = TYPES) -> list[str]:
    """What differs."""
    return [*compare(types, "PodTemplate", "V1PodTemplateSpec", set())]


if __name__ == "__main__":
    differences = findings()
    print("\n".join(differences) or f"The pod schema is that of kubernetes {kubernetes.__version__}.")
    sys.exit(bool(differences))
