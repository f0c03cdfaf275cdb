"""What the operators compute, in plain PyTorch. The compiled kernels give the same bits."""
