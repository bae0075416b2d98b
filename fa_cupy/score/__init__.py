"""Score expressions: text, typed tree, ranges, derivatives, NumPy, CUDA C++."""
