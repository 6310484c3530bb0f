"""Owns what is sent to clients' own servers when a call has ended: its form, its signature, and when it is tried again.

Must not know how calls are made or answered.
"""
