"""Owns the process that has one device: its command queue, step loop and the states of its jobs.

Knows no scheduling: it executes its commands first in, first out.
"""
