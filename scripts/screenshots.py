"""Takes the pictures of docs/screenshots: the status page of a demo server under load, in headless Chromium.

.venv/bin/python scripts/screenshots.py --seconds 150
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import subprocess
import tempfile
import time
from pathlib import Path

from ep_server.cli.app import App, assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.client import AsyncClient
from ep_server.config import Config

OUT = Path(__file__).parents[1] / "docs" / "screenshots"
SIZES = {"desktop": (1200, 1100, 1), "phone": (390, 1990, 1.5)}  # width, height, scale
SCHEMES = {"light": 1, "dark": 0}
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


async def load(app: App, seconds: float) -> None:
    """Callers whose number goes up and down; ends when the time is over."""
    end, draw = time.monotonic() + seconds, random.Random(1)

    async def caller(client: AsyncClient, number: int) -> None:
        while time.monotonic() < end:
            wanted = 8 + 6 * math.sin((end - time.monotonic()) / 13)
            if number > wanted:
                await asyncio.sleep(0.5)
                continue
            prompt = [draw.randrange(10) for _ in range(draw.randrange(8, 60))]
            tokens = draw.randrange(40, 300)
            await client.complete(prompt, max_new_tokens=tokens, ignore_eos=True, timeout=600)

    async with AsyncClient(app.server.address) as client:
        await asyncio.gather(*(caller(client, number) for number in range(14)))


def shoot(url: str) -> None:
    OUT.mkdir(exist_ok=True)
    for size, (width, height, scale) in SIZES.items():
        for scheme, setting in SCHEMES.items():
            with tempfile.TemporaryDirectory() as profile:
                flags = (
                    f"--user-data-dir={profile}",
                    f"--window-size={width},{height}",
                    f"--force-device-scale-factor={scale}",
                    f"--blink-settings=preferredColorScheme={setting}",
                    "--virtual-time-budget=500",
                    f"--screenshot={OUT / f'status-{size}-{scheme}.png'}",
                )
                line = ["chromium", *FLAGS, *flags, url]
                subprocess.run(line, check=True, capture_output=True, timeout=120)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150)
    seconds = parser.parse_args().seconds
    flags = {
        "model.path": str(DEMO_MODEL),
        "model.name": "demo_model",
        "parallel.ranks": 4,
        "parallel.threads_per_rank": 1,
        "scheduler.kv_blocks": 160,
        "grpc.port": 0,
        "metrics.port": 0,
    }
    async with assemble(Config.load(flags=flags, environ={})) as app:
        await app.server.start(lambda *_: None)
        busy = asyncio.create_task(load(app, seconds))
        await asyncio.sleep(seconds - 15)
        await asyncio.to_thread(shoot, app.metrics_url.removesuffix("metrics"))
        await busy
        await app.server.stop()


if __name__ == "__main__":
    asyncio.run(main())
