"""Owns batches: files of calls, one a line, that are made one after another, and files of their answers.

Must not know what a call is: it makes each through the application, as a client would.
"""
