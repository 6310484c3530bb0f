"""Owns the workload fitted to GenTD26: its parameters, users and their sessions, and its cost table."""
