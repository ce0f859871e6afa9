"""The ZeroMQ engine link: the swarm server binds, the engine's processes connect and pull batches."""
