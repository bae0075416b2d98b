"""The host side of the GPU path: which kernel, how it is compiled, loaded and launched."""
