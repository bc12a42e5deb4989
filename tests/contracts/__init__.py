"""Contract tests; a package, so that mypy can tell its conftest from the shared one."""
