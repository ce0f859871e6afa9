"""Prefixes that several rows of a mini-batch share are computed once: a trie in place of rows."""
