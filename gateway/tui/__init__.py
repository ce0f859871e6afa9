"""The monitor in the terminal: what swarm servers and gateways tell of themselves, live.

Invariant: it asks ``GET /status`` and nothing else, so looking changes nothing. Only :mod:`gateway.tui.app` and what is
below :mod:`gateway.tui.widgets` run the terminal; the rest is plain functions and objects.
"""
