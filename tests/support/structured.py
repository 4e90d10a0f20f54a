"""A checkpoint whose tokens are bytes and whose weights are random: any byte is as likely as another."""

from __future__ import annotations

import json
from pathlib import Path

import ep_server
from tests.support.tokenizers import EOS, byte_level, save

DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"


def byte_checkpoint(folder: Path) -> Path:
    """The shape of the demo model. Serve it with model.load_format = dummy."""
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"vocab_size": EOS + 1, "eos_token_id": EOS, "pad_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    save(byte_level(), folder)
    return folder
