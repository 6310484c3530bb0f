"""Owns the rules that decide what runs where, one file per policy, and the rule of admission.

Policies see the cluster through `core.policy` only, and keep no clock, socket or random state.
"""
