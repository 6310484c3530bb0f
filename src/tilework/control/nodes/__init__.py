"""What an engine knows of its nodes: which are there, what their devices are called, where states are, their clocks.

Knows no connection, process or clock: `runtime` drives it with agents, `sim` with simulated ones.
"""
