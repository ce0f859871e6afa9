"""What stands between a request and harm: places, shared retries, and upstreams whose health is known."""
