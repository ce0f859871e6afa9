"""The journal: every state change that someone is told about, on disk before they are told."""

from swarm.server.journal.journal import Journal, JournalStats, OnDisk

__all__ = ["Journal", "JournalStats", "OnDisk"]
