"""Set-up on the user's bare Python, with the standard library alone: an environment, and what is built for it."""
