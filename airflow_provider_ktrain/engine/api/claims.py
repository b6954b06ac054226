"""Requests about the ResourceClaims of pods: which devices are allocated to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.state.pods.devices import Claim, read_claim
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, get

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")  #: in which the provider reads claims, the preferred one first
READ_SECONDS = 5.0  #: for the claims of one call together
AT_ONCE = 8  #: requests


async def read_claims(api: Api, namespace: str, names: Iterable[str]) -> dict[str, Claim] | None:
    """ResourceClaims by name, as far as they can be read in READ_SECONDS.

    :return: the claims; None if the right to read them is missing, or the cluster doesn't serve them.
    """
    found: dict[str, Claim] = {}
    first, *others = [*names]
    with contextlib.suppress(TimeoutError, KtrainError):
        async with asyncio.timeout(READ_SECONDS):
            try:
                group = await get(api, f"/apis/{GROUP}") or {}
                offered = {one["version"] for one in group.get("versions") or ()}
                version = next((version for version in VERSIONS if version in offered), "")
                if not version:
                    return None
                path = f"/apis/{GROUP}/{version}/namespaces/{namespace}/resourceclaims"
                found[first] = read_claim(await get(api, f"{path}/{first}") or {})
            except ApiStatusError as e:
                if e.transient:
                    return found
                return None
            for begin in range(0, len(others), AT_ONCE):
                some = others[begin : begin + AT_ONCE]
                read = await asyncio.gather(*(_read(api, f"{path}/{name}") for name in some))
                found |= {name: claim for name, claim in zip(some, read, strict=True) if claim is not None}
    return found


async def _read(api: Api, path: str) -> Claim | None:
    """The claim at a path; None if it can't be read now."""
    try:
        return read_claim(await get(api, path) or {})
    except KtrainError:
        return None
