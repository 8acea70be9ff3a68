"""Hosts that share nothing but ssh: their names and slots, programs run on them, the network between them."""
