"""Kernels of the GPU decode step in Triton. Only ranks with a GPU import them; needs the package `triton`.

Every launcher may be captured in a CUDA graph: it allocates nothing, reads nothing from the device, and its
grid depends on shapes only. Kernels read what differs between steps (lengths, slots, counts) from device
tensors, and write their results into tensors of the caller.
"""
