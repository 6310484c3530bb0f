"""Owns messages between processes through a ring in memory that producers write and one consumer reads, one-sidedly.

A producer hands over a message without the consumer's CPU, and a producer that dies or sleeps in the middle of one
delays no other. Knows no torch, jobs or models. docs/ring.md has the protocol and what was proven of it.
"""
