"""Who may use the control routes, and where the server may listen without a token."""
