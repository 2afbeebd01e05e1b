"""Federated data: one store of tensors, and which client holds which of its samples."""
