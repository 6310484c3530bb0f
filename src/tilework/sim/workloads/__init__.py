"""Owns the workloads by name: those of published evaluations and some of our own, made from a seed.

Each is a frozen dataclass of its parameters. It knows the cost table and the number of devices that it is meant for; of
policies it knows nothing.
"""
