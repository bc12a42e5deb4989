"""Compaction: estimates, spill, prune and summary. Only compaction may move the cached prefix."""
