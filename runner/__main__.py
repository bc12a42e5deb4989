"""``python -m runner``: the same as the ``nightshift`` command."""

import gc
import os

if __name__ == "__main__":
    gc.disable()  # until a command begins its work: searching through what is imported takes a tenth of the start
    try:
        from runner.cli.main import main

        main()
    except KeyboardInterrupt:  # while modules are imported, or output is flushed: there is nothing to clear up
        os._exit(130)
