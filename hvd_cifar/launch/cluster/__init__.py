"""Machines that share nothing but ssh: which there are, how to run something on each, the network between them."""
