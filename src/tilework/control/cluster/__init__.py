"""Owns the controller's record of the cluster: jobs, devices, works, the queue, load by tenant, reservations.

Makes no decision: it records decisions and reports, and answers policies (`ClusterView`) and admission (`Backlog`).
"""
