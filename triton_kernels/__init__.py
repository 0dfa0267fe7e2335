"""Triton kernels: one kernel per file (installed as `ktgraph.triton_kernels`)."""
