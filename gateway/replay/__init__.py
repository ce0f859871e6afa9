"""Replay a dataset through an application or an OpenAI-compatible address, and report its rewards by training step."""
