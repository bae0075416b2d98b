"""The commands of ``python -m fa_cupy``, one module each."""
