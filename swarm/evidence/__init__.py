"""Whether a challenger may take an incumbent's place: pairs of what both did with one request, and the verdict on them.

Pure functions without I/O: the same pairs give the same verdict anywhere.
"""
