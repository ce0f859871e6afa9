"""What is seen from outside: metrics, traces, logs. Other packages use only :mod:`gateway.observability.request`."""
