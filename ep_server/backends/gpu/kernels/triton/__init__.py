"""Kernels of the GPU decode step, in Triton. Imported by ranks with a GPU only; needs the package `triton`.

Every launcher here may be captured in a CUDA graph: it allocates nothing, asks the device nothing, and its
grid follows from shapes alone. What differs from step to step (lengths, slots, counts) is read by the
kernels from device tensors. Outputs are written into tensors that the caller gives.
"""
