"""The journal: every state change that someone is told about, on disk before they are told."""
