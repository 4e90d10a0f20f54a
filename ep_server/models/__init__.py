"""The decode step in torch."""
