"""Owns the live driver of the controller: worker processes, their pipes, the event log, results.

Imports no torch: models live in worker processes.
"""
