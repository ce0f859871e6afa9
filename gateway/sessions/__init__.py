"""Conversations: which request goes on from which answer, and what a session as a whole earns."""
