"""Stand-ins for the engine and vLLM, and the rules that keep them as strict as the real ones."""
