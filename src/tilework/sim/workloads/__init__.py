"""Owns the workloads by name, made from a seed: how one is written, and those that ship.

Each is a frozen dataclass of its parameters. It knows the cost table and the number of devices that it is meant for; of
policies it knows nothing.
"""
