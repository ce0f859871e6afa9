"""Finished episodes on their way into a batch: groups, collection methods, clients, shares, and the bounds on them."""

from swarm.server.batching.collection import Admission, Collection
from swarm.server.batching.groups import DropCause, Dropped, Failure

__all__ = ["Admission", "Collection", "DropCause", "Dropped", "Failure"]
