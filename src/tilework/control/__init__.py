"""Owns the controller: a pure state machine that takes an event and the time, and returns actions.

Knows no clock, socket, process or torch; `runtime` and `sim` drive the same object.
"""
