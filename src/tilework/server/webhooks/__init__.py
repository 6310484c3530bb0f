"""Owns the notices to clients' own servers when a call has ended: their form, their signature, and further attempts.

Must not know how calls are made or answered.
"""
