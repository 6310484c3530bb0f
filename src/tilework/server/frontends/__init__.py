"""Owns the processes that take HTTP in front of the controller: their messages, their start and restart.

A front end has connections and nothing else. Must not know what a call is, nor which routes there are.
"""
