"""Where requests come in and outcomes go out: one endpoint per dialect, and the delivery they share."""
