"""`ep-server bench`: measures a server over gRPC (online) or an engine in this process (offline)."""
