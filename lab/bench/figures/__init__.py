"""The published figures, remade in simulation: one function per figure, in a file per paper.

It owns which runs a figure needs, and what the paper says of them. It must not know how results are written.
"""
