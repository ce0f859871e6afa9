"""What people wrote: what of it is private, and what may be kept and trained."""
