"""Owns the routes: what happens between an HTTP request and its answer, and their OpenAPI document.

Must not know how requests are scheduled, nor how bytes go over a connection.
"""
