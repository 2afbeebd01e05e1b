"""Convolutions of a cohort: how they are put in place, the two operations that they need, and these as kernels."""
