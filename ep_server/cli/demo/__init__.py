"""`ep-server demo`: serve the demo model and ask it sums."""
