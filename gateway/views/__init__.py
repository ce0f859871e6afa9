"""What the command line and the monitor show of servers and groups, as lines and tables of text."""
