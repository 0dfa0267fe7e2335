"""Graph passes: one pass per file, the file named as the pass (installed as `ktgraph.passes`)."""
