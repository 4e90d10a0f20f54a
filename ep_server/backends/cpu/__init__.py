"""The decode step on CPUs."""
