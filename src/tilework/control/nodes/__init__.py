"""Owns the engine's record of its nodes: their places, the numbers of their devices, their state blobs, their clocks.

Knows no connection, process or clock: `runtime` drives it with agents, `sim` with simulated ones.
"""
