"""Measuring: routed experts on the CPU against the limits of the machine and against peers.

Installed with ktgraph for `ktgraph bench` and `ktgraph doctor`; `bench/` of the repository adds
peers.  Cells are measured one by one and kept in a JSON-lines file, so that a run resumes.
"""
