"""The public test kit: what tests of tasks, profiles and extensions need."""
