"""Waits for the changes of a subscription."""

from __future__ import annotations

from collections.abc import AsyncIterator

from airflow_provider_ktrain.engine.watch.subscription import Subscription, WatchEvent


async def changed(subscription: Subscription) -> list[WatchEvent]:
    """What `take` returns as soon as there is something: [] if the first list is empty."""
    while (taken := subscription.take()) is None:
        await subscription._news.wait()
    return taken


async def changes(subscription: Subscription) -> AsyncIterator[WatchEvent]:
    """Each change, as soon as it comes."""
    while True:
        for event in await changed(subscription):
            yield event
