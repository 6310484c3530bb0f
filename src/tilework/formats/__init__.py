"""Owns the file formats that several packages read and write: workloads, arrival traces and schedules."""
