"""Owns what is known of CUDA on this machine: the build of torch, the driver, and the cards with their memory.

Decides nothing. If CUDA does not work, it says what is there and what to do.
"""
