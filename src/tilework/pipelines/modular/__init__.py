"""Owns modular pipelines on disk: their index, and how they are loaded. `stock` runs them.

No code that lies beside the weights is run: blocks and components are classes of the installed libraries.
"""
