"""Tests: `single` in one process, `parallel` under a real launcher, `launch` through run.sh."""
