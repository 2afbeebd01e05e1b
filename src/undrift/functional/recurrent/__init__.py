"""Recurrent layers of a cohort: GRU and LSTM as tensor operations, and their loops over time as kernels."""
