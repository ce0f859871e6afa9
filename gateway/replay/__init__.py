"""Replay a dataset through an application or an OpenAI-compatible address, and report what it did to the rewards."""

from gateway.replay.report import Report
from gateway.replay.run import ReplayConfig, replay

__all__ = ["ReplayConfig", "Report", "replay"]
