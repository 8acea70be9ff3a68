"""From one command line to ranks on one machine or many: the launcher, the hosts' network, and set-up."""
