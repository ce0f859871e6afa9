"""Reward hooks: user code that shapes requests and scores answers relative to each other."""
