"""Every test of this folder needs a device."""

import pytest


def pytest_itemcollected(item):
    """Mark each test that is collected from this folder."""
    item.add_marker(pytest.mark.gpu)
