"""The sandbox: what confines every command and file tool, and how it is proved."""
