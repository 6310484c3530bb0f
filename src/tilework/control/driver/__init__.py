"""Owns the protocol between the controller and devices, for every driver: works in flight, states, moves, stuck works.

Knows no pipe, process or clock: it takes actions, reports and lost devices, and returns what is to be sent and told.
"""
