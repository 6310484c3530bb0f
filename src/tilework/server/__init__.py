"""Owns the HTTP API, configuration and wiring of a live server.

The only package that reads the environment.
"""
