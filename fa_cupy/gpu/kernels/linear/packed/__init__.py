"""What packed sequences take besides the kernels of causal products."""
