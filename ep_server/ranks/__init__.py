"""The only place that knows there are several processes."""
