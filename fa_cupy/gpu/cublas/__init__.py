"""The algorithms on cuBLAS products: calls that have no kernel."""
