"""The six baselines by name.

Source: TridentServe §8.1 and appendix D.2. Whatever they take from a declared workload is a parameter here; by name
they follow the requests that were seen (`Layout`). Departures of all six:

- Requests that do not fit into memory fail; the paper reports the whole run as failed.
- A stage runs on several devices only as far as it was profiled there. So all stages hold a group of B1 to B4, and the
  encode runs on the first of its devices.
- No other request of a line is tried while the first finds no group, also in B4 and B6. The paper does not say so. It
  keeps a wide request from waiting forever beside narrow ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilework.policy.placement.roles import Role
from tilework_lab.policies.trident_baselines.layout import Layout
from tilework_lab.policies.trident_baselines.policy import TridentBaseline


def one_degree(degree: int | None = None) -> TridentBaseline:
    """Build B1: all stages on every device, one degree for all, first in, first out.

    The paper calls it the scheme of xDiT.

    `degree` is half of the optimal degree of the largest request; the digits are missing in our text. By this rule it
    is 4 for FLUX.1, CogVideoX1.5 and HunyuanVideo. For SD3 it is 1, while the paper's table 6, which has other optimal
    degrees than our costs, gives 2.
    """
    return TridentBaseline(layout=Layout(grouping="one_degree", degree=degree))


def buckets(shares: Mapping[int, float] | None = None) -> TridentBaseline:
    """Build B2: all stages on every device, disjoint buckets by degree, each first in, first out.

    A request goes to the bucket of the optimal degree of its steps. `shares` is how many requests have each, in
    proportion: the devices that table 6 gives a degree say the same.
    """
    return TridentBaseline(layout=Layout(grouping="buckets", shares=shares))


def own_degree() -> TridentBaseline:
    """Build B3: all stages on every device, all at the optimal degree of the steps; first in, first out."""
    return TridentBaseline(layout=Layout(grouping="per_request"))


def own_degree_shortest_first() -> TridentBaseline:
    """Build B4: as B3, by the shortest remaining time, with aging."""
    return TridentBaseline(layout=Layout(grouping="per_request"), shortest_first=True)


def pooled_buckets(
    shares: Mapping[int, float] | None = None, pools: Mapping[Role, float] | None = None
) -> TridentBaseline:
    """Build B5: a pool of devices for each role, in buckets by its optimal degree, each first in, first out.

    `shares` are those of B2, and divide the pool of D; the other pools follow what was seen. `pools` is the size of
    each pool, in proportion, as in table 7.
    """
    return TridentBaseline(layout=Layout(grouping="buckets", is_pooled=True, shares=shares, pools=pools))


def pooled_shortest_first(pools: Mapping[Role, float] | None = None) -> TridentBaseline:
    """Build B6: a pool of devices for each role, each stage at its optimal degree; by the shortest remaining time.

    A job ages as in B4. `pools` are those of B5.
    """
    return TridentBaseline(layout=Layout(grouping="per_request", is_pooled=True, pools=pools), shortest_first=True)
