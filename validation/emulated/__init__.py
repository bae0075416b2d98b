"""Calls of whole functions by kernels in `validation.emulator`: what the host does, in NumPy."""

from validation.emulated.backward import attention_backward as attention_backward
