"""Every test of this folder needs a device."""

import pytest


def pytest_itemcollected(item):
    """Mark each test that is collected from this folder."""
    item.add_marker(pytest.mark.gpu)


@pytest.fixture
def fresh_kernels(cupy):
    """A device on which kernels run, with no plan known before the test and after it."""
    from fa_cupy.gpu.driver.devices import current_target
    from tests.support import plans

    if current_target() is None:
        pytest.skip("the kernels do not run on this device")
    plans.forget()
    yield
    plans.forget()
