"""Starts ranks on one machine or many: the launcher, the network between hosts, and set-up."""
