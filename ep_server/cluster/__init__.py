"""Several nodes as one server: the link between them, their ranks, and calls that come in at any of them."""
