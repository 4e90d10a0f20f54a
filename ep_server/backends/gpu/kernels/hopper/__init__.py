"""Python launchers of the Hopper kernels in csrc/kernels/hopper."""
