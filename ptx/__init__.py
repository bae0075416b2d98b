"""PTX wrappers, shipped as data."""
