"""`doctor`: checks of all hosts at once for the usual faults, and a small real job."""
