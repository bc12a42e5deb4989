"""Hooks that come with the product: retry, repeat reminders, checks."""
