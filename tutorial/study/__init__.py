"""What the tutorials' studies share: runs of ``swarm-gateway up``, held-out scores, and their plot."""
