"""The exchange between hosts, over libfabric."""
