"""The monitor in the terminal: what swarm servers and gateways report in ``GET /status``, live.

Invariant: it asks ``GET /status`` and nothing else, so looking changes nothing. Only ``app``, ``pages`` and ``widgets``
import textual; ``monitor --json`` needs ``client`` and ``targets`` alone.
"""
