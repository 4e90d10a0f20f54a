"""GPU kernels: Triton, and hand-written ones for Hopper."""
