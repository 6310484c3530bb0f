"""Messages between the runtime and a worker process, both ways.

They travel through a local pipe (`comm.messages`), and between nodes over a network (`comm.net`).

A worker executes commands first in, first out; only `StopWork` and `BreakGroup` overtake others.

A job's state travels as blobs: a worker serializes the named values that a stage has written to a place that all
workers of the node can read, and names the blob in its report. A worker that needs it gets the name in a command.
"""
