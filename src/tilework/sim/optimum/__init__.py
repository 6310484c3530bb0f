"""Owns yardsticks: how much anybody could achieve on a workload who knows all of it beforehand.

A bound for any size, the optimum of small cases, and DDiT's theoretical allocation. Knows no policy and no controller.
"""
