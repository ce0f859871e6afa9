"""Which model name leads where: routes, the table that finds them, upstreams, and reloads while requests run."""
