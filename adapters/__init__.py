"""Adapters to the outside: wire dialects, model files, and the real trainer."""
