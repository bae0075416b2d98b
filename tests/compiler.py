"""The C++ compiler that runs kernels on the CPU: without one, tests that use it are skipped."""

import pytest

from validation import emulator

needs_compiler = pytest.mark.skipif(
    emulator.compiler() is None, reason="there is no g++: kernels cannot run on the CPU"
)
