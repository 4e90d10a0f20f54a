"""[6] Attention on a GPU, and the choice of its kernels."""
