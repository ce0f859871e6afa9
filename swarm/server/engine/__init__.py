"""The engine: its processes, its state, its runs and the code that it imports."""
