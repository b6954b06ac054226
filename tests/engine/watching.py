"""Waits for the changes of a subscription."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from airflow_provider_ktrain.engine.watch.informer import Subscription


class Change(NamedTuple):
    """An object that was added or changed, or as it was before its deletion."""

    object: dict[str, Any]
    deleted: bool

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])


async def changed(subscription: Subscription) -> list[Change]:
    """What has changed, as soon as there is something: [] if the first list is empty."""
    while (taken := subscription.take()) is None:
        await subscription._news.wait()
    deleted = [Change(obj, deleted=True) for obj in taken]
    uids = [uid for uid in subscription.take_changed() if uid in subscription.objects]
    return [*deleted, *(Change(subscription.objects[uid], deleted=False) for uid in uids)]


async def changes(subscription: Subscription) -> AsyncIterator[Change]:
    """Each change, as soon as it comes."""
    while True:
        for change in await changed(subscription):
            yield change
