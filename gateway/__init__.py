"""The gateway: answers an unmodified app like vLLM and turns its requests into swarm episodes."""
