"""How GPU tests are shared out over processes and devices."""

from types import SimpleNamespace

from tests.support import devices_plugin


def test_processes_begin_with_different_devices():
    assert [devices_plugin.visible_devices(i, 2) for i in range(3)] == ["0,1", "1,0", "0,1"]
    assert devices_plugin.visible_devices(5, 4) == "1,2,3,0"


def test_processes_have_cores_of_their_own():
    assert devices_plugin.cores_of(0, 16) == {0, 1, 2, 3}
    assert devices_plugin.cores_of(15, 16) == {15, 0, 1, 2}
    assert devices_plugin.cores_of(1, 2) == {0, 1}


def test_long_tests_come_first_and_others_keep_their_order():
    def item(nodeid, drawn=False):
        return SimpleNamespace(nodeid=nodeid, obj=SimpleNamespace(is_hypothesis_test=drawn))

    short, drawn = item("tests/gpu/test_a.py::test_b"), item("tests/gpu/test_a.py::test_c", True)
    another, whole = item("tests/api/test_d.py::test_e"), item("tests/gpu/test_validation.py::x")
    items = [short, drawn, another, whole]
    devices_plugin.pytest_collection_modifyitems(items)
    assert items == [whole, drawn, short, another]
