"""Finished episodes on their way into a batch: groups, collection methods, clients, shares, and the bounds on them."""
