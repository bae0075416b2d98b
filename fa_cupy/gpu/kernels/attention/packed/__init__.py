"""Packed sequences: what each row and each tile of them sees, computed from offsets on the device."""
