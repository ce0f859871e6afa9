"""The texts that people wrote: which may be kept and trained."""
