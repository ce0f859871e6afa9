"""Where requests come in and outcomes go out: the endpoints, and the delivery they share."""
