"""Who answers a route's users: the incumbent, and what a challenger does behind it."""
