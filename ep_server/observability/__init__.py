"""Metrics, traces and the status page, for operators."""
