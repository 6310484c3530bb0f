"""Simulated nodes: their sessions with the server, their blobs and clocks, and front ends before the server.

What the server knows of nodes is the code that serves (`control.nodes`).
"""
