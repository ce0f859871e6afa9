"""The texts that people wrote: which parts are private, and which may be kept and trained."""
