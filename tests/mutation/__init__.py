"""Do the tests notice faults? Small faults, planted one at a time; not part of the tests that CI runs."""
