"""Other hosts, reached by ssh or srun: names and slots, programs that run there, and the network between hosts."""
