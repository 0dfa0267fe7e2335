"""Weights: sources, encodings, recipes."""
