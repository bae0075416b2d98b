"""The tiled NumPy implementation, one file per family."""
