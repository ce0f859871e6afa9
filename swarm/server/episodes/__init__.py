"""Episodes from claim to end: who runs each, what it recorded, and when it is taken back."""
