"""What runs on a GPU and writes results: checks, accuracy, benchmarks, sanitizers, the receipt."""
