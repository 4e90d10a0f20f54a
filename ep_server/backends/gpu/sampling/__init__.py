"""[9] Sampling on a GPU."""
