"""Keys of applications: those of the configuration, and virtual keys that are made and revoked while a gateway runs."""
