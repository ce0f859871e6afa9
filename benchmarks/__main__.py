"""``python -m benchmarks``: what the gateway adds to a request."""

from benchmarks.overhead import main

# servers are spawned: their processes import this module again
if __name__ == "__main__":
    main()
