"""Tokens to text and back, and stop strings."""
