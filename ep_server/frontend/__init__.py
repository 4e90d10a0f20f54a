"""[1] [2] The gRPC server: ports, services, and the translation of calls into requests."""
