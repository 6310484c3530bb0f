"""Owns the papers' laboratory: baselines and ablations, workloads, figures, comparisons of policies, and bounds.

It stands on Tilework, which finds it by entry points and knows nothing else of it.
"""
