"""Ready-made rewards: rules, checks of what an answer says, and rewards by comparison within a group."""
