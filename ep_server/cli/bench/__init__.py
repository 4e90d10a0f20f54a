"""What `ep-server bench` measures: an engine in this process (offline) or a server over gRPC (online)."""
