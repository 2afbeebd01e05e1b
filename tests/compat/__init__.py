"""Models that undrift's authors did not write, each trained by every engine and by a loop in plain PyTorch."""
