"""The addresses beside the dialects: models, health and status, and those of the operator."""
