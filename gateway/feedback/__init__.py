"""What users say and show of answers, and the groups that stay open for it."""

from gateway.feedback.open_groups import Hold, OpenGroups

__all__ = ["Hold", "OpenGroups"]
