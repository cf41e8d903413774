"""The command line, with one module per command."""

import os
import signal
import sys

if sys.argv[1:2] == ["serve"]:
    # The imports of this command take a part of a second. A SIGTERM meanwhile ends it with 0, as
    # later ones do.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
