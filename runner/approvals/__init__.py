"""Approvals by declared rules: a pure decision and the events that record it."""
