"""Owns the commands `tilework compare` and `tilework bound`: options, tables, documents and plots."""
