"""The decode step on a GPU: the layer loop over fused kernels, its inputs and its graphs.

Only ranks with a GPU import it. Its tests compare it with the CPU's decoder (models/decoder.py).
"""
