"""``python -m benchmarks``: measurements, each a subcommand that prints JSON; its module says what it measures and how.

* ``overhead``: what the gateway adds to a request.
* ``hooks``: what the hook runner adds to a hook.
* ``lifecycle``: durable claims and ends per second, against a plain dict server.
* ``soak``: hundreds of clients on several servers for minutes; errors, memory and file descriptors.
* ``serving``: latency of a fixed rate of requests over real training steps, by serving mode.
* ``code``: code sync of many files, from a git checkout to the selected snapshot.
* ``credit``: what credit for the outcomes of sessions teaches, against a control.
* ``judging``: what judgements by keyboard on the page teach, against controls.
* ``study``: what a study of 12 experiments finds, while it is killed again and again.
* ``loop``: steps per hour of whole training loops: ours, verl's own, TRL's.
* ``turns``: steps per hour with agents of several turns: merged timelines and shared prefixes against a row per call.
* ``lora``: an adapter against all weights, and its versions side by side in one engine, with the real verl and vLLM.
* ``boot``: seconds from the start to the first answer, by stage; two checkouts in turn.
* ``gate``: how soon the gate finds a worse policy, and its false alarms, by simulation.
* ``policies``: which degraded and which healthy policies the gate lets pass, with the real engine.
* ``watch``: whether the watch over training sees a collapse in time, with the real verl and vLLM.
* ``training``: an update with shared prefixes computed once, against verl's padded rows.
* ``redaction``: what the rules of redaction find and miss among look-alikes, and what they cost.
* ``deletion``: how long the deletion of one key among a million episodes takes.
"""

from __future__ import annotations

import argparse

from benchmarks import (
    boot,
    code,
    credit,
    deletion,
    gate,
    hooks,
    judging,
    lifecycle,
    loop,
    lora,
    overhead,
    policies,
    redaction,
    serving,
    soak,
    study,
    training,
    turns,
    watch,
)

BENCHMARKS = {
    "overhead": overhead,
    "hooks": hooks,
    "lifecycle": lifecycle,
    "soak": soak,
    "serving": serving,
    "code": code,
    "credit": credit,
    "judging": judging,
    "study": study,
    "loop": loop,
    "turns": turns,
    "lora": lora,
    "boot": boot,
    "gate": gate,
    "policies": policies,
    "training": training,
    "watch": watch,
    "redaction": redaction,
    "deletion": deletion,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements; each prints JSON.")
    commands = parser.add_subparsers(required=True)
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


# servers are spawned: their processes import this module again
if __name__ == "__main__":
    main()
