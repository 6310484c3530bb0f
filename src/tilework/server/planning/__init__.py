"""How many devices a server should have, by its own recent traffic: what came, and the process that plans.

Knows of the simulator no more than the command line of `tilework plan`.
"""
