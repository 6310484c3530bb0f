"""Owns the sweep of case `exactness`: models with random weights, requests, the ways to run them, and the errors."""
