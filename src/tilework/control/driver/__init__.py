"""Owns the protocol between the controller and devices, for every driver: works in flight, states, moves, stuck works.

Knows no pipe, process or clock: it takes actions and reports, and returns messages for devices and effects.
"""
