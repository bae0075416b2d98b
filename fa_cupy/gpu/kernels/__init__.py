"""The host side of the kernels: variants, parameter structs, launches."""
