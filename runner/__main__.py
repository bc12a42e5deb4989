"""``python -m runner``: the same as the ``nightshift`` command."""

import gc

if __name__ == "__main__":
    gc.disable()  # until a command begins its work: searching through what is imported takes a tenth of the start
    from runner.cli.main import main

    main()
