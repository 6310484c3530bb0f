"""Owns the parts that policies are made of: demand, degrees, order, groups of devices, knapsack."""
