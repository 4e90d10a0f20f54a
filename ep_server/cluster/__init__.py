"""Several nodes as one server: the link between them, their ranks, and calls that arrive at any of them."""
