"""Owns the policies that others have published, one file each."""
