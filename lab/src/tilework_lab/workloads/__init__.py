"""Owns the workloads of published evaluations, and some of our own that single out a weakness of a policy.

Each is a frozen dataclass of its parameters. Of policies it knows nothing.
"""
