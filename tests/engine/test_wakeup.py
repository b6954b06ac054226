"""What wakes a coroutine that waits for several things."""

from __future__ import annotations

import asyncio

from airflow_provider_ktrain.engine.watch.wakeup import Wakeup


async def test_wait_returns_at_once_if_it_was_set_before() -> None:
    wakeup = Wakeup()
    wakeup.set()
    assert await wakeup.wait()
    assert not await wakeup.wait(0), "the first wait has unset it"


async def test_any_source_wakes_the_waiting_coroutine() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    wakeup.set()
    wakeup.set()
    assert await waiting
    assert not await wakeup.wait(0)


async def test_what_is_set_while_a_wait_is_canceled_is_not_lost() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    wakeup.set()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert await wakeup.wait(0)


async def test_a_new_wait_replaces_a_canceled_one() -> None:
    """The canceled task ends after the new one has begun to wait."""
    wakeup = Wakeup()
    canceled = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    canceled.cancel()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.wait([canceled])
    wakeup.set()
    assert await waiting
