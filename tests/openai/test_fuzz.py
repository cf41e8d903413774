"""Random bodies: an answer or a refusal, never a fault."""

from __future__ import annotations

import random

from fastapi.testclient import TestClient
from random_bodies import problem, random_body
from standins import TINY, Echo

from smartspec_gateway.openai.app import create_app
from smartspec_gateway.openai.endpoint import Settings
from smartspec_gateway.openai.prompts import Prompts

NUM_BODIES = 300


def test_no_body_is_a_fault() -> None:
    app = create_app(Echo(), Prompts(TINY), Settings("smartspec", 512))
    client = TestClient(app, raise_server_exceptions=False)
    num_good = 0
    for number in range(NUM_BODIES):
        path, body = random_body(random.Random(f"2/{number}"))
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert problem(answer.status_code, answer.content) == "", (number, body[:500])
        num_good += answer.status_code == 200
    assert num_good > NUM_BODIES // 5
