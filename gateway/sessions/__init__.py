"""Conversations: which request continues which answer, and the reward of a session as a whole."""
