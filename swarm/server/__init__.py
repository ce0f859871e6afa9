"""The swarm server: control plane (engine, episodes) and data plane (each episode's recording OpenAI endpoint)."""
