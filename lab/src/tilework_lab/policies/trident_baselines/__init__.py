"""Owns the baselines of TridentServe, `trident-b1` to `trident-b6`: static divisions of devices for stages.

They stand on `placement` and the toolkit; TridentServe itself is another package.
"""
