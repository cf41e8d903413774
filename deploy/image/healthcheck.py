"""Exit status 0 if the model on this machine can serve, else 1.

    healthcheck.py [URL]        default http://127.0.0.1:8000

Sends a request that only a running step loop can answer. /v2/health/ready only shows that Triton
runs, and /v2/models/smartspec/ready that the model was loaded. Both stay 200 if the loop or its
process hangs. The request needs no space in the queue and no row in the batch. This file uses only
the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 60.0
"""The loop answers at its next step. As long as `limits.hang_s` of engine.json by default: whoever
has work and makes no progress for this long hangs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    url = f"{parser.parse_args().url}/v2/models/smartspec/generate"
    fields = {"text_input": "health", "max_tokens": 1, "health_check": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(request, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        sys.exit(f"{url}: {error.code}: {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
