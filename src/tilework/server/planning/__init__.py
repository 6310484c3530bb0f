"""Owns the number of devices that recent traffic of a server needs: that traffic, and the process that plans.

Knows of the simulator only the command line of `tilework plan`.
"""
