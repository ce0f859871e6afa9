"""One request becomes a group of episodes: claim, sample, judge, submit; and how its answers come back.

Invariant: whatever the return policy, a group that is trained has rewards that one call of its hook gave for all of it.
"""

from gateway.fanout.best import best
from gateway.fanout.first import first
from gateway.fanout.policy import Policy
from gateway.fanout.straight import straight

__all__ = ["Policy", "best", "first", "straight"]
