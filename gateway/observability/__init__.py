"""Metrics, traces and logs. Other packages use only :mod:`gateway.observability.request`."""
