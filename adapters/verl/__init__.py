"""The real verl trainer with its vLLM replicas, fed by the swarm server over the engine link."""
