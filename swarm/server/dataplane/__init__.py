"""The data plane: each claimed episode's own OpenAI endpoint, which serves through vLLM and records it."""
