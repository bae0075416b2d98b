"""The host sides of the kernels that read the visible pairs of a mask one by one."""
