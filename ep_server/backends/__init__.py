"""How a rank computes: on CPUs or on one GPU. Each has its own kernels, runner and sampler."""
