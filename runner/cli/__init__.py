"""The command line: one file a command group, nothing heavy at module top level."""
