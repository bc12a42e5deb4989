"""``python -m runner``: the same as the ``nightshift`` command."""

from runner.cli.main import main

if __name__ == "__main__":
    main()
