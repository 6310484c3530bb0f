"""Kernels that may be worth using: measured beside what Tilework does today, and used nowhere until a GPU says so."""
