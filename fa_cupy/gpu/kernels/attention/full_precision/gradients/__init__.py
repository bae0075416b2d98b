"""The host sides of the kernels for gradients in float32 and float64."""
