"""HTTP manners shared by both servers: request ids, OpenAI-shaped errors, bounded bodies, bearer tokens."""
