"""A pytest plugin that keeps Python's garbage collector away from modules and tests.

They are many and stay until the end. Each full collection would look at all of them, in a third of
a second, while tests are collected and in every test that calls ``gc.collect``.
"""

import gc

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
