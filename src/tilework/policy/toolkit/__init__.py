"""Owns the parts that policies are made of. A part knows no policy; a policy combines parts and adds its own rule.

Which parts a policy needs follows from how it gives devices to jobs:

    A job keeps its devices, and the next job waits for them
        fixed_groups         Lane, LanePlan: devices in lanes; a policy says which job comes next on a lane.
        used by              edf, fixed-sp*, bucketed, spci, dpci, dp
    The group is chosen again for each chunk of steps
        elastic_groups       DevicePool: the devices that are open now; a policy places jobs on groups of them.
        used by              ddit, edf-narrowest, gf-dit-*, rssp, srtf, tridentserve
    Several jobs share the forward passes of one device
        continuous_batching  ContinuousBatching: a queue for each device; a policy says which jobs make the next steps.
        used by              patchedserve, mixed-cache, nirvana

`tetriserve` and the default policy plan in ways of their own, and use the parts below alone.

Parts for any policy:

    order                the order of service, by arrival or by deadline, so that no job starves; jobs whose deadline
                         can no longer be met; DeadlinePolicy: the base of policies that choose degrees by deadlines
    known_demands        what is known by class of requests: the remaining work at each degree, and the cheapest in time
    tasks                the remaining work of a job, timed at each degree
    degrees              degrees that follow from a profile alone: the efficient ones, and the best doubling
    knapsack             one option for each group, with the most value that fits the devices
    open_devices         which devices may be given a work now, and when the next one opens
    buddy_allocator      which of the free devices make up a group
    loads                how long a device would load before it can run a job, and what its node has
    starts               the works that a plan starts: how many steps make a chunk, and why a job is started, in words
"""
