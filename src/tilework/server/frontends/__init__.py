"""Owns the processes that take HTTP in front of the controller: their messages, their start and restart.

A front end has connections and nothing else. Must not know what a call is, nor which routes there are.

So each call, key, journal, limit and metric is in one place, and is right with any number of front ends. Rejected: an
engine over a socket, with calls in each front end. A call would be known to one of them alone, and lost with it. All
front ends accept from one listening socket, which the controller's process holds: connections that were not accepted
yet outlive a front end. Rejected: SO_REUSEPORT, with which each has a queue of its own.
"""
