"""Studies: experiments that are proposed, run, judged and reported without a person; see ``docs/studies.md``."""
