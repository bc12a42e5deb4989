"""Artifacts: what a run leaves behind, derived from the log."""
