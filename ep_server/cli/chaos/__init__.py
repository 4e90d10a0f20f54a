"""`ep-server chaos`: kills and stalls ranks of a running server, and compares its streams."""
