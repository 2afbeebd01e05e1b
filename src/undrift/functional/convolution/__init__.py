"""Convolutions of a cohort: the modes that install them, their operations, and the Triton kernels of these."""
