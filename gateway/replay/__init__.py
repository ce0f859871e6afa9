"""Replay a dataset through an application or an OpenAI-compatible address, and report what it did to the rewards."""

from gateway.replay.output import ReplayBar, print_report
from gateway.replay.report import Report, read_report, write_report
from gateway.replay.run import ReplayConfig, make_config, replay
from gateway.replay.senders import CommandSender, HttpSender, Outcome, Prompt, Sender

__all__ = [
    "CommandSender",
    "HttpSender",
    "Outcome",
    "Prompt",
    "ReplayBar",
    "ReplayConfig",
    "Report",
    "Sender",
    "make_config",
    "print_report",
    "read_report",
    "replay",
    "write_report",
]
