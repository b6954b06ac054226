"""What all tests share: their order."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, so that no worker waits for them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
