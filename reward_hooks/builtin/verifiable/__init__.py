"""Rewards that can be checked: known answers, mathematics, and code that is run."""
