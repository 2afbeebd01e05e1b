"""Federated data: one store of tensors, and who holds which of its rows."""
