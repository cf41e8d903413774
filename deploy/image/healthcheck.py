"""Exit status 0 where the model on this machine can serve, 1 where not.

It asks for the model and not for /v2/health/ready: when the step loop dies, the model unloads
itself, and a Triton without any model calls itself ready.
"""

from __future__ import annotations

import sys
import urllib.request

URL = "http://127.0.0.1:8000/v2/models/smartspec/ready"
TIMEOUT_S = 4.0

if __name__ == "__main__":
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(URL, timeout=TIMEOUT_S).close()
    except OSError as error:
        sys.exit(f"{URL}: {error}")
