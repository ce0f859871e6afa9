"""``up`` and ``train``: the processes of a run on one machine, started, watched and stopped together."""
