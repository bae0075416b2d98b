"""The host sides of the kernels for float32 and float64."""
