"""The algorithms, written once over an array namespace."""
