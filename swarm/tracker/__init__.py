"""Capture of what an episode sampled: LLM calls merged into timelines."""
