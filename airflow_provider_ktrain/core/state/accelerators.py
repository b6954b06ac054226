"""The accelerators that Kubernetes counts: the one table of their names. Nothing else in the package names a resource.

An amount is counted under the name of its resource, and never added to another one: a MIG slice is not a GPU. Only
whole GPUs of all vendors are one kind, `GPU`. `[ktrain] accelerators` adds rows: see `add_host_rows`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import mapping

GPU = "gpu"  #: Whole GPUs, of whatever vendor.
CLAIMS = "claims"  #: Instead of devices of ResourceClaims, which are not counted: the pods that have some.
DEFAULT_RESOURCE = "nvidia.com/gpu"  #: What `gpus` requests, unless `[ktrain] default_accelerator` is set.
SHARED = ".shared"  #: End of the name of a resource whose units are shares of one: time slices, consumable capacity.
#: Precedes the name of a DeviceClass: a resource that the devices of a ResourceClaim serve (KEP-5004).
DEVICE_CLASS = "deviceclass.resource.kubernetes.io/"

Amounts = Counter[str]  #: How many units of each accelerator; CLAIMS counts pods.


class Accelerator(NamedTuple):
    """A row of the table.

    :param resource: the name of the resource, as a regular expression. What its group matches replaces {} in the unit.
    :param unit: what one unit is called, in the singular.
    :param device: the device that a unit is, or is a part of.
    :param units: the unit in the plural. Default: with an s.
    """

    resource: str
    unit: str
    device: str
    units: str = ""


#: The first row that matches counts.
TABLE = (
    # github.com/NVIDIA/k8s-device-plugin: gpu; with `mig.strategy: mixed` mig-PROFILE; `renameByDefault` adds .shared
    # and NVIDIA/kubevirt-gpu-device-plugin: pgpu; some name the model: gpu-h100
    Accelerator(r"nvidia\.com/p?gpu(?:-.+)?", "GPU", "GPU"),
    Accelerator(r"nvidia\.com/mig(?:-(.+))?", "MIG {} slice", "GPU"),
    # github.com/ROCm/k8s-device-plugin, `resource_naming_strategy`: `single` has only gpu, also for partitions; `mixed`
    # names the partitioning, of which SPX leaves a GPU whole
    Accelerator(r"amd\.com/gpu|amd\.com/spx_nps\d+", "GPU", "GPU"),
    Accelerator(r"amd\.com/([dtqc]px)_nps\d+", "GPU partition", "GPU"),
    # cloud.google.com/kubernetes-engine/docs/concepts/tpus: a unit is a chip
    Accelerator(r"google\.com/tpu", "TPU", "TPU"),
    # awsdocs-neuron, containers/tutorials/k8s-neuron-device-plugin: a device has several cores; neurondevice is older
    Accelerator(r"aws\.amazon\.com/neuron(?:device)?", "Neuron device", "Neuron device"),
    Accelerator(r"aws\.amazon\.com/neuroncore", "Neuron core", "Neuron device"),
    # docs.habana.ai, Intel_Gaudi_Kubernetes_Device_Plugin
    Accelerator(r"habana\.ai/gaudi", "Gaudi accelerator", "Gaudi accelerator"),
    # ascend-device-plugin, README: Ascend910, Ascend310P; vNPUs such as Ascend910-16c. project-hami.io: Ascend910B;
    # Ascend910B-memory and -core are no devices
    Accelerator(r"huawei\.com/(?:Ascend\d+\w*|npu)", "NPU", "NPU"),
    Accelerator(r"huawei\.com/Ascend\d+\w*-\d+c(?:\.\w+)*", "vNPU", "NPU"),
    # intel-device-plugins-for-kubernetes, cmd/gpu_plugin: by kernel driver. tiles, millicores, memory.max and those
    # with _monitoring are no devices
    Accelerator(r"gpu\.intel\.com/(?:i915|xe)", "GPU", "GPU"),
    # plugins of other vendors
    Accelerator(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+/gpu", "GPU", "GPU"),
)

#: Names that users write, for `ktrain check`.
COMMON_NAMES = (
    "nvidia.com/gpu", "amd.com/gpu", "google.com/tpu", "aws.amazon.com/neuron", "aws.amazon.com/neuroncore",
    "habana.ai/gaudi", "huawei.com/Ascend910", "huawei.com/Ascend310", "huawei.com/Ascend310P", "gpu.intel.com/i915",
    "gpu.intel.com/xe",
)  # fmt: skip

_host_rows: Callable[[], list[Accelerator]] = list


def add_host_rows(read: Callable[[], list[Accelerator]]) -> None:
    """Let this process count what its host's configuration adds to the table.

    :param read: returns rows, such as those of `configured_rows`. It is called when an amount is first counted.
    """
    global _host_rows
    _host_rows = read
    for cached in (_table, _row, accelerator_of, unit_of):
        cached.cache_clear()


def parse_row(entry: str) -> Accelerator:
    """A row of the table: `NAME=UNIT` or `NAME=UNIT|UNITS`; `*` stands for any text.

    :param entry: such as `example.com/npu=NPU` or `example.com/die-*=die|dice`.
    :raises ValueError: it has another form.
    """
    name, _, names = (part.strip() for part in entry.partition("="))
    unit, _, units = (part.strip() for part in names.partition("|"))
    if not unit or not re.fullmatch(r"[\w.*-]+/[\w.*-]+", name):
        raise ValueError(f"{entry!r}: expected NAME=UNIT, such as example.com/npu=NPU")
    return Accelerator(re.escape(name).replace(r"\*", ".*"), unit, unit, units)


def configured_rows(text: str, default: str, refuse: Callable[[str], object]) -> list[Accelerator]:
    """The rows of the configuration, and one for the default resource unless the table has it.

    :param text: `[ktrain] accelerators`: entries of `parse_row`, separated by commas.
    :param default: `[ktrain] default_accelerator`.
    :param refuse: gets what is wrong with an entry or the default, which then has no row.
    """
    rows: list[Accelerator] = []

    def add(entry: str) -> None:
        try:
            rows.append(parse_row(entry))
        except ValueError as e:
            refuse(str(e))

    for entry in filter(None, map(str.strip, text.split(","))):
        add(entry)
    if not any(re.fullmatch(row.resource, default) for row in (*rows, *TABLE)):
        add(f"{default}={default.rpartition('/')[2]}")
    return rows


@functools.cache
def _table() -> tuple[Accelerator, ...]:
    return (*_host_rows(), *TABLE)


@functools.lru_cache(maxsize=512)
def _row(resource: str) -> tuple[int, Accelerator, str] | None:
    """Number and row of a resource, and what the row's group matches; None if it isn't an accelerator."""
    for number, row in enumerate(_table()):
        if found := re.fullmatch(row.resource, resource):
            return number, row, (found[1] or "") if found.re.groups else ""
    return None


@functools.lru_cache(maxsize=512)
def accelerator_of(resource: str) -> str | None:
    """The name under which a resource is counted: GPU, or its own; None if it isn't an accelerator."""
    if resource.endswith(SHARED) and accelerator_of(resource.removesuffix(SHARED)):
        return resource
    found = _row(resource)
    return None if found is None else GPU if found[1].unit == "GPU" else resource


def is_gpu(resource: str) -> bool:
    """Whether a resource is a GPU or a part of one, which CUDA, ROCm or oneAPI use."""
    name = accelerator_of(resource) or ""
    found = _row(name.removesuffix(SHARED))
    return name == GPU or (found is not None and found[1].device == "GPU")


def is_accelerator(name: str) -> bool:
    """Whether something is counted that is known to be an accelerator or a part of one."""
    return name == GPU or accelerator_of(name.removesuffix(SHARED)) is not None


@functools.lru_cache(maxsize=512)
def unit_of(name: str) -> tuple[str, str]:
    """What one unit and several units are called.

    :param name: a key of `Amounts`, also one that another process has counted.
    """
    if name == GPU:
        return "GPU", "GPUs"
    if name.endswith(SHARED):
        one, several = unit_of(accelerator_of(name.removesuffix(SHARED)) or name.removesuffix(SHARED))
        return f"shared {one}", f"shared {several}"
    found = _row(name)
    if found is None:
        kind = "unit" if "/" in name else "device"
        return f"{kind} of {name}", f"{kind}s of {name}"
    _, row, matched = found
    one, several = (" ".join(text.replace("{}", matched).split()) for text in (row.unit, row.units or f"{row.unit}s"))
    return one, several


def ordered(names: Iterable[str]) -> list[str]:
    """Keys of `Amounts` without CLAIMS: whole GPUs first, then as in the table, then others."""

    def rank(name: str) -> tuple[int, bool, str]:
        found = _row(name.removesuffix(SHARED))
        return -1 if name == GPU else found[0] if found else len(_table()), name.endswith(SHARED), name

    return sorted({*names} - {CLAIMS}, key=rank)


def counted_units(number: int, name: str) -> str:
    """A number with its unit: `1 GPU`, `16 TPUs`."""
    return f"{number:,} {unit_of(name)[number != 1]}"


def described(amounts: Mapping[str, int], none: str) -> str:
    """The amounts by kind: `8 GPUs and 2 MIG 1g.5gb slices`."""
    names = ordered(name for name, number in amounts.items() if number)
    same = Counter(unit_of(name) for name in names)
    texts = [counted_units(amounts[name], name) + (f" ({name})" if same[unit_of(name)] > 1 else "") for name in names]
    if amounts.get(CLAIMS):
        texts.append("devices of ResourceClaims (not counted)")
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:]))) or none


def units_together(names: Iterable[str]) -> str:
    """What amounts of several kinds are called together: `GPUs`, or `accelerators` if they have different units."""
    units = {unit_of(name)[1] for name in {*names} - {CLAIMS}}
    return units.pop() if len(units) == 1 else "accelerators"


def times(number: int, amounts: Mapping[str, int]) -> Amounts:
    """The amounts of a number of equal pods."""
    return Amounts({name: number * amount for name, amount in amounts.items()})


def stored(amounts: Mapping[str, int]) -> dict[str, Any]:
    """The fields of an amount in a format: `gpus`, and beside it what else there is.

    `gpus` counts the first kind. If that isn't GPUs, `resource` names it. `others` has other kinds, `unknown_claims`
    the number of pods with ResourceClaims, whose devices are not counted.
    """
    first, *others = ordered(name for name, number in amounts.items() if number) or [GPU]
    fields: dict[str, Any] = {"gpus": amounts.get(first, 0)}
    fields |= {} if first == GPU else {"resource": first}
    fields |= {"others": {name: amounts[name] for name in others}} if others else {}
    return fields | ({"unknown_claims": amounts[CLAIMS]} if amounts.get(CLAIMS) else {})


def read_stored(fields: Mapping[str, Any]) -> Amounts:
    """The amounts that `stored` has described, in this release or another one. What isn't a number is left out."""
    found = {str(fields.get("resource") or GPU): fields.get("gpus"), **mapping(fields.get("others"))}
    found[CLAIMS] = fields.get("unknown_claims")
    numbers = {name: int(n) for name, n in found.items() if isinstance(n, int | float) and 0 < n < 1e15}
    return Amounts(numbers)
