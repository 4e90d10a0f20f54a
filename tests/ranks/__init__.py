"""Tests of the rank processes."""
