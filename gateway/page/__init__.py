"""The page at ``/ui``, where people look at groups, judge them and decide: a pack."""
