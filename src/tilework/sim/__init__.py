"""Owns the simulated driver of the controller: virtual clock, modelled devices, workloads.

Needs no torch and never meets `runtime`.
"""
