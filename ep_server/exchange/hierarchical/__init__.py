"""The exchange of GPUs on several hosts: NVLink inside a host, the network between hosts."""
