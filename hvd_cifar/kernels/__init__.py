"""CPU kernels: convolutions compiled at set-up, and what calls them."""
