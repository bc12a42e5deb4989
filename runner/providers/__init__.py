"""Model providers: one protocol, adapters that do not know each other."""
