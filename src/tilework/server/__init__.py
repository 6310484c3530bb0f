"""Owns the HTTP API of a live server, its settings and tenants, and its start and stop.

The only package that reads the environment. Nothing below it knows HTTP.
"""
