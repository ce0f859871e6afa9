"""``python -m gateway.cli``: the command line of this interpreter, whatever is on PATH."""

from gateway.cli import main

main()
