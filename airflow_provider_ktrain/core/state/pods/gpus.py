"""The GPUs and other extended resources that a pod requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=256)
def is_gpu(resource: str) -> bool:
    """Whether an extended resource is a GPU or a part of one: nvidia.com/gpu, amd.com/gpu, nvidia.com/mig-1g.5gb."""
    return bool(re.fullmatch(r"[a-z0-9.-]+\.com/(gpu(\.shared)?|mig-.+)", resource))


def pod_gpus(pod_spec: Mapping[str, Any]) -> int:
    """The GPUs that one pod requests."""
    return pod_amount(pod_spec, is_gpu)


def pod_amount(pod_spec: Mapping[str, Any], counts: Callable[[str], bool]) -> int:
    """How much one pod requests of the extended resources that `counts` selects by name.

    That is the sum of its containers, or the largest amount of an init container if that is more.
    """

    def requested(container: Mapping[str, Any]) -> int:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        return sum(_whole(amount) for name, amount in amounts.items() if counts(name))

    together = sum(requested(c) for c in pod_spec.get("containers") or () if isinstance(c, Mapping))
    return max([together, *(requested(c) for c in pod_spec.get("initContainers") or () if isinstance(c, Mapping))])


def _whole(amount: Any) -> int:
    return int(amount) if str(amount).isdigit() else 0
