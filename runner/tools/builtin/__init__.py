"""The tools that come with the product."""
