"""``python -m adapters.verl JOB.yaml``: one engine run, started by the swarm server's supervisor."""

from adapters.verl.driver import main

if __name__ == "__main__":
    main()
