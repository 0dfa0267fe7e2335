"""Frontends: each turns one kind of model into an unplaced IR module (`ktgraph.frontends`)."""
