"""The journal: a change is on disk before any response reports it."""
