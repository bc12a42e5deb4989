"""The agent: one loop, its inbox, prompt, budget and hook points."""
