"""As torch.distributed.algorithms."""
