"""Owns the client that sends workloads to a server and measures what a user would see.

Needs neither torch nor a server in its process.
"""
