"""The journal: every change that someone is told about is on disk before they are told."""
