"""Owns the file formats that several packages read and write: workloads and arrival traces."""
