"""Computes how many devices to buy: the fewest that keep a share of the deadlines, by simulation of the controller that
serves. Knows workloads and the simulator; not where requests come from, nor who asks.
"""
