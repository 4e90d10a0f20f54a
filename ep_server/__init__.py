"""ep_server: an expert-parallel decode server for Mixture-of-Experts models."""

__version__ = "0.1.0"
