"""The monitor in the terminal: shows ``GET /status`` of swarm servers and gateways live, and sends no other request.

Only ``app``, ``pages`` and ``widgets`` import textual; ``monitor --json`` needs ``targets`` alone.
"""
