"""How many devices to buy: the fewest with which a share of the deadlines is kept, by simulation of the controller that
serves. Knows workloads and the simulator; not where requests come from, nor who asks.
"""
