"""Owns the policies that others have published, one file or folder each. They know the toolkit, and not
the default policy.
"""
