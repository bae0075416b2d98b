"""What the plugin for the garbage collector leaves behind."""

import gc

import pytest

from tests.support import gc_plugin


def test_the_garbage_collector_rests_until_tests_are_collected():
    hook, before = gc_plugin.pytest_collection(), gc.get_freeze_count()
    next(hook)
    assert not gc.isenabled()
    kept = [[]]
    with pytest.raises(StopIteration) as stopped:
        hook.send("what others return")
    assert stopped.value.value == "what others return"
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(x is kept for x in gc.get_objects())
