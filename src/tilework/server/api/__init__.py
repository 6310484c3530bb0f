"""Owns the routes: what happens between an HTTP request and its answer."""
