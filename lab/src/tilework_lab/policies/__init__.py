"""Owns policies that Tilework is compared with: baselines of papers, rules of other servers, and ablations.

Each stands on `tilework.policy.toolkit` and `placement`, so that no change of the default policy changes it.
"""
