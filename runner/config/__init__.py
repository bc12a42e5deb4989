"""Configuration: YAML in, frozen specs with the origin of each value out."""
