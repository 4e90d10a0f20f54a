"""OpenAI's client through the SMG gateway in its prefill/decode mode: the decode server fetches the KV."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.doors.openai_gateway import chat_checkpoint, pd_gateway
from tests.support.frontend import WAIT

PROMPT = "The decode server fetches what the prefill server has computed. " * 3
FIELDS: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
OPTIONS = (
    *("--load-format", "dummy", "--ranks", "2"),
    # A busy machine must not look like a prefill server that is lost.
    *("--handoff-silence-seconds", "60", "--handoff-stall-seconds", "60"),
)


def received(log: Path) -> int:
    """Hand-offs that arrived, of the server with this log."""
    found = re.search(r"metrics at (\S+)", log.read_text())
    assert found is not None
    text = urlopen(found[1], timeout=WAIT).read().decode()
    counts = re.findall(r'^epserver_kv_handoffs_total\{.*result="received".*\} (\S+)$', text, re.MULTILINE)
    return int(sum(map(float, counts)))


@pytest.mark.asyncio
async def test_the_gateway_drives_hand_offs(tmp_path: Path) -> None:
    async with pd_gateway(chat_checkpoint(tmp_path), tmp_path, *OPTIONS) as (gateway, prefill):
        alone = await prefill.complete(PROMPT, max_new_tokens=8, temperature=0, bypass_prefix_cache=True)
        create = gateway.openai.completions.create
        answer = await create(**FIELDS)
        assert answer.choices[0].text == alone.text
        parts = [part async for part in await create(stream=True, **FIELDS)]
        assert "".join(part.choices[0].text for part in parts if part.choices) == alone.text
        several = await create(**FIELDS, n=2)  # the gateway hands over single sequences alone
        assert [choice.text for choice in several.choices] == [alone.text] * 2
        async with asyncio.timeout(WAIT):  # ranks report when they park
            while await asyncio.to_thread(received, tmp_path / "decode.log") == 0:
                await asyncio.sleep(0.05)
