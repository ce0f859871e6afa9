"""Private parts of texts: how they are found, and what stands for them."""
