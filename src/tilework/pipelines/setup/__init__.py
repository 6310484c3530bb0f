"""Owns the setup of a stock pipeline beyond its defaults: quantised weights, offloading, compilation, attention.

Each is diffusers' own call, so that a stock pipeline can be set up in the same way.
"""
