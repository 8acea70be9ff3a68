"""`doctor`: what usually goes wrong on one machine or many, looked at on every host at once, and a small real job."""
