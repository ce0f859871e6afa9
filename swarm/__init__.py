"""The swarm: episodes, groups and the server that turns their rewards into training batches."""
