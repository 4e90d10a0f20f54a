"""What operators see: metrics, traces, the status page."""
