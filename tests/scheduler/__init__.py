"""Tests of the pure scheduler."""
