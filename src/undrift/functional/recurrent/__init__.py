"""Recurrent layers of a cohort: GRU and LSTM modules that run under vmap, their loops over time, and Triton kernels."""
