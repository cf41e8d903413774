"""The page of the endpoint in a real Chromium, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smartspec_launch.address import free_address
from smartspec_launch.triton_server import TritonServer

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

STATE = """
JSON.stringify({
  texts: ["left", "right"].map((id) =>
    (document.querySelector("#" + id + " .answer") || {}).textContent || ""),
  errors: [...document.querySelectorAll(".error")].map((one) => one.textContent).join(""),
  drafts: document.querySelectorAll("#left .answer .draft_model").length,
  bars: document.querySelectorAll("#left .steps .draft_model").length,
  accepted: document.querySelector("#left .facts span:last-child b")?.textContent,
  withoutSpeculation: document.querySelector("#right .facts")?.textContent,
  result: document.getElementById("result").textContent,
  turns: document.getElementById("turns").childElementCount,
  values: document.getElementById("values").childElementCount,
  isDone: !document.getElementById("send").disabled,
  width: document.documentElement.scrollWidth,
})
"""


class Tab:
    """errors: what the console logged."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[Any] = []

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            found = await self._socket.receive_json()
            if found.get("id") == self._number:
                return found["result"]
            if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(found["params"])

    async def state(self) -> dict[str, Any] | None:
        """None while the page is not loaded."""
        found = await self.call("Runtime.evaluate", expression=STATE)
        value = found["result"].get("value")
        return None if value is None else json.loads(value)

    async def wait(self, condition: Any) -> dict[str, Any]:
        """The state, when the condition holds."""
        for _ in range(600):
            state = await self.state()
            if state is not None and condition(state):
                return state
            await asyncio.sleep(0.1)
        raise AssertionError(f"not in 60 s: {state}")


@contextlib.asynccontextmanager
async def tab(folder: Path) -> AsyncIterator[Tab]:
    port = free_address().http_port
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += [f"--remote-debugging-port={port}", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await _address(session, port), max_msg_size=0) as socket,
        ):
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait()


async def _address(session: aiohttp.ClientSession, port: int) -> str:
    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                pages = [one for one in await response.json() if one["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        await asyncio.sleep(0.1)
    raise AssertionError("Chromium did not start")


def test_a_message_is_answered_with_and_without_speculation(
    local_server: TritonServer, tmp_path: Path
) -> None:
    """By keyboard, at two widths: both texts are the same, steps with accepted drafts are
    coloured, the server's values are shown, and nothing is wider than the window."""
    assert local_server.openai is not None
    page = local_server.openai.url(local_server.address).removesuffix("v1")

    async def run() -> None:
        async with tab(tmp_path) as found:
            await found.call("Runtime.enable")
            await found.call("Log.enable")
            for width in (1280, 400):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await found.call("Emulation.setDeviceMetricsOverride", **size)
                await found.call("Page.navigate", url=page)
                await found.wait(lambda state: state["values"] > 0)
                choose = 'document.getElementById("policy").value = "fixed:2"; '
                focus = 'document.getElementById("prompt").focus()'
                await found.call("Runtime.evaluate", expression=choose + focus)
                key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 2}
                await found.call("Input.dispatchKeyEvent", type="keyDown", **key)
                state = await found.wait(lambda state: state["isDone"] and state["result"])
                assert state["errors"] == ""
                assert state["texts"][0] == state["texts"][1] != ""
                assert state["drafts"] == int(state["accepted"]) > 0
                assert state["bars"] > 0
                assert "1.00 tokens per step" in state["withoutSpeculation"]
                assert state["result"].endswith("The texts are the same.")
                assert "times as fast. First token after " in state["result"]
                assert state["turns"] == 2
                assert state["width"] <= width
            assert found.errors == []

    asyncio.run(run())
