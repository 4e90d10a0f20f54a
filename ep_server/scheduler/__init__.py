"""Pure scheduling: no torch, grpc, asyncio or clock."""
