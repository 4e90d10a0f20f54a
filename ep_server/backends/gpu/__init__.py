"""The decode step on a GPU: the layer loop over Triton kernels, what it reads, and its graphs.

Imported by ranks with a GPU only. The decoder of the CPU engine (model/decoder.py) is its oracle.
"""
