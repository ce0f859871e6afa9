"""What the monitor is made of on the screen; every text that they show is made by plain functions beside them."""
