"""Owns what every HTTP server needs: connections, bodies, middleware, the form of errors, server-sent events.

Must not know what a call is, nor which routes there are.
"""
