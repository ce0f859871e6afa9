"""Measurements; nothing imports them."""
