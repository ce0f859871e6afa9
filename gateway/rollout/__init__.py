"""One request becomes a group of episodes: claim, sample, judge, submit; and how its answers come back.

Invariant: whatever the return policy, a group that is trained has rewards that one call of its hook gave for all of it.
"""
