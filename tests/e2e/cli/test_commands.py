"""The command line against a real server over FakeRanks."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ep_server
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.cli.main import main
from ep_server.config import Config, fields
from ep_server.testing.fake_ranks import FakeRanks, scripted
from ep_server.text.chat_template import ChatTemplate
from tests.support.frontend import MODEL, NO_TOKENIZER, WAIT, Served, serving
from tests.support.tokenizers import EOS


async def run(served: Served | None, *arguments: str) -> int:
    """The exit code of a command, run in a thread of its own: the server needs this one."""
    address = ["--address", served.server.address] if served is not None else []
    async with asyncio.timeout(WAIT):
        return await asyncio.to_thread(main, [*arguments, *address])


async def test_health_is_an_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        assert await run(served, "health") == 0
        assert await run(served, "health", "--service", "ep_server.v1.Decode") == 0
        assert capfd.readouterr().out == "SERVING\nSERVING\n"
        assert await run(served, "health", "--service", "nobody") == 1
        assert "NOT_FOUND: no service 'nobody'" in capfd.readouterr().err
        await served.server.stop()  # its port is closed
        assert await run(served, "health", "--timeout", "2") == 1
        assert re.match("ep-server: error: (UNAVAILABLE|DEADLINE_EXCEEDED): ", capfd.readouterr().err)


async def test_health_of_a_server_that_drains(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        served.server.ask_to_stop()
        await served.server.serve()  # returns at once; the port is open still
        assert await run(served, "health") == 1
        assert await run(served, "health", "--service", "") == 0
        assert capfd.readouterr() == ("NOT_SERVING\nSERVING\n", "")


async def test_generate_streams_text(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeRanks(next_token=scripted(*"né😀 ok".encode(), EOS))) as served:
        arguments = ("--max-new-tokens", "20", "--temperature", "0", "--seed", "3", "--stop", "ok", "--stats")
        assert await run(served, "generate", "hello", *arguments) == 0
        out, err = capfd.readouterr()
        assert out == "né😀 \n"
        assert re.fullmatch(
            r"5 prompt tokens \(0 cached\), 10 output, first after [\d.]+ s \([\d.]+ s queued\), "
            r"then [\d.]+ tokens/s\n",
            err,
        )
        (request,) = served.ranks.requests.values()
        assert request.prompt_ids == tuple(b"hello") and request.sampling.seed == 3
        assert request.stopping.max_new_tokens == 20 and request.stopping.stop_strings == ("ok",)


async def test_generate_several(capfd: pytest.CaptureFixture[str]) -> None:
    fake = FakeRanks(next_token=lambda request, index: ord("abc"[request.sampling.seed or 0]))
    async with serving(fake) as served:
        assert await run(served, "generate", "hello", "-n", "3", "--seed", "0", "--max-new-tokens", "2") == 0
        out, _ = capfd.readouterr()
        assert sorted(out.splitlines()) == ["[0] aa", "[1] bb", "[2] cc"]
        assert await run(served, "generate", "hello", "-n", "0") == 1
        assert "num_sequences = 0: must be 1 to 128" in capfd.readouterr().err


async def test_generate_with_token_ids(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(model=NO_TOKENIZER) as served:
        assert await run(served, "generate", "--ids", "4 5", "--max-new-tokens", "3") == 0
        assert capfd.readouterr().out == "6 7 8 \n"
        assert await run(served, "generate", "--ids", "four") == 1
        assert "PROMPT = 'four': must be token ids" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("hello", "--top-k", "-1"), "top_k = -1: must be whole numbers, 0 to 4294967295"),
        (("hello", "--max-new-tokens", "4294967296"), "max_new_tokens = 4294967296: must be whole numbers"),
        (("hello", "--seed", "-1"), "seed = -1: must be whole numbers, 0 to 18446744073709551615"),
        (("--ids", "1 -2"), "ids = [1, -2]: must be whole numbers"),
        (("\ud800",), r"text = '\ud800': must be valid UTF-8 text"),
    ],
)
async def test_a_value_that_no_message_carries_is_one_line(
    arguments: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving() as served:
        assert await run(served, "generate", *arguments) == 1
        err = capfd.readouterr().err
        assert words in err and err.count("\n") == 1
        assert not served.ranks.requests


async def test_generate_chat(capfd: pytest.CaptureFixture[str]) -> None:
    template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"}, {}
    )
    async with serving(model=dataclasses.replace(MODEL, chat_template=template)) as served:
        for arguments, prompt in ((("--chat",), b"uhi|"), (("--system", "be"), b"sbe|uhi|")):
            assert await run(served, "generate", "hi", *arguments, "--max-new-tokens", "1") == 0
            assert capfd.readouterr().out == "}\n"
            assert bytes(served.ranks.requests[max(served.ranks.requests)].prompt_ids) == prompt
        assert await run(served, "generate", "1", "--chat", "--ids") == 1
        assert "--ids = True: must be absent beside --chat" in capfd.readouterr().err


async def test_generate_within_a_grammar(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text("no schema")
    async with serving() as served:
        for flag, value, field in (
            ("--regex", "(", "grammar.regex"),
            ("--ebnf", "root =", "grammar.ebnf"),
            ("--json-schema", f"@{schema}", "grammar.json_schema"),
        ):
            assert await run(served, "generate", "hi", flag, value) == 1
            assert f"INVALID_ARGUMENT: {field} = " in capfd.readouterr().err
        assert await run(served, "generate", "hi", "--json-schema", "@/no-such-file") == 1
        assert "--json-schema = '@/no-such-file': must be a text, or @" in capfd.readouterr().err
        assert await run(served, "generate", "hi", "--regex", "a", "--choice", "b") == 1
        assert "a request has one grammar" in capfd.readouterr().err


async def test_generate_reads_standard_input(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("AB"))
    async with serving() as served:
        assert await run(served, "generate", "-", "--max-new-tokens", "2") == 0
        assert capfd.readouterr().out == "CD\n"


async def test_errors_are_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async with serving() as served:
        assert await run(served, "generate", "hi", "--top-p", "7") == 1
        message = "INVALID_ARGUMENT: sampling.top_p = 7.0: must be above 0, at most 1"
        assert capfd.readouterr().err == f"ep-server: error: {message}\n"
        assert await run(served, "generate", "hi", "--token-file", str(tmp_path / "none")) == 1
        assert "--token-file = " in capfd.readouterr().err
    assert await run(None, "serve", "--ranks", "65") == 1
    assert capfd.readouterr().err == "ep-server: error: parallel.ranks = 65: must be 1 to 64\n"
    assert await run(None, "serve", "--model", str(tmp_path)) == 1
    assert "config.json" in capfd.readouterr().err
    assert await run(None, "inspect", str(tmp_path / "none")) == 1
    assert capfd.readouterr().err.count("\n") == 1
    assert await run(None, "generate", "hi", "--no-such-flag") == 2


async def test_a_token_from_a_file(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("# mine\nsecret\n")
    async with serving(grpc__token_file=str(file)) as served:
        assert await run(served, "generate", "A", "--max-new-tokens", "1", "--token-file", str(file)) == 0
        assert await run(served, "generate", "A") == 1
        assert "UNAUTHENTICATED" in capfd.readouterr().err


@pytest.mark.parametrize("arrivals", [("--concurrency", "3"), ("--rate", "400")])
async def test_bench(capfd: pytest.CaptureFixture[str], arrivals: tuple[str, str]) -> None:
    async with serving(FakeRanks(2)) as served:
        load = ("--requests", "10", "--prompt-tokens", "5", "--new-tokens", "7", "--warmup", "1", *arrivals)
        assert await run(served, "bench", "online", *load, "--json") == 0
        report = json.loads(capfd.readouterr().out)
        assert (report["requests"], report["errors"], report["output_tokens"]) == (10, 0, 70)
        assert report["tokens_per_second"] > 0 and report["tokens_per_message"] >= 1
        for name in ("time_to_first_token", "end_to_end", "inter_token_latency"):
            assert 0 <= report[name]["p50"] <= report[name]["p99"] <= report[name]["max"]
        assert len(served.ranks.requests) == 11
        assert {len(request.prompt_ids) for request in served.ranks.requests.values()} == {5}
        assert await run(served, "bench", "online", *load) == 0
        out = capfd.readouterr().out
        assert "time to first token" in out and "tokens/s" in out


async def test_bench_counts_what_fails(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(scheduler__max_running=1, scheduler__max_queue=0) as served:
        served.ranks.hold()
        bench = asyncio.ensure_future(
            run(served, "bench", "online", "--requests", "4", "--concurrency", "4", "--warmup", "0", "--json")
        )
        await served.until(lambda: len(served.heard.refused) == 3)
        served.ranks.release()
        assert await bench == 1
        report = json.loads(capfd.readouterr().out)
        assert (report["requests"], report["statuses"]) == (1, {"RESOURCE_EXHAUSTED": 3})


async def test_bench_that_cannot_fit(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        assert await run(served, "bench", "online", "--prompt-tokens", "70000") == 1
        assert "at most 65536, the model's context" in capfd.readouterr().err


def test_inspect(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = Path(ep_server.__file__).parent / "assets" / "demo_model"
    assert main(["inspect", str(model), "--ranks", "3"]) == 0
    out = capfd.readouterr().out
    for text in ("qwen3_moe", "16 per layer, 4 per token", "0 to 5 (6)", "11 to 15 (5)", "exchange"):
        assert text in out
    assert main(["inspect", str(model), "--ranks", "0"]) == 1
    assert capfd.readouterr().err == "ep-server: error: parallel.ranks = 0: must be 1 to 64\n"


def test_inspect_names_what_is_not_used(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = Path(ep_server.__file__).parent / "assets" / "demo_model"
    assert main(["inspect", str(model)]) == 0
    assert "not read" not in (out := capfd.readouterr().out) and "not used" not in out
    copy = shutil.copytree(model, tmp_path / "copy")
    values = json.loads((copy / "config.json").read_text()) | {"logit_scale": 0.5, "new": {"a": 1}}
    (copy / "config.json").write_text(json.dumps(values))
    assert main(["inspect", str(copy)]) == 0
    assert "keys of config.json that are not read (2: logit_scale, new)" in capfd.readouterr().out
    (copy / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 1}))
    assert main(["inspect", str(copy)]) == 1
    assert "num_hidden_layers = 1, but the checkpoint has tensors" in capfd.readouterr().err


def test_config_lists_every_option(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["config"]) == 0
    out = capfd.readouterr().out
    assert [name for name, _, _ in fields() if name not in out] == []


def test_the_configuration_file_it_prints_is_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--toml"]) == 0
    tree = tomllib.loads(capfd.readouterr().out)
    flat = {f"{section}.{name}": value for section, table in tree.items() for name, value in table.items()}
    assert Config.from_values(flat) == Config()


def test_every_option_is_a_flag_with_a_help_text(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["serve", "--help"]) == 0
    out = capfd.readouterr().out
    for name, _, item in fields():
        assert "--" + name.replace(".", "-").replace("_", "-") in out
        assert item.metadata["help"] in out
    for command in (
        "generate",
        "bench",
        "bench online",
        "bench offline",
        "inspect",
        "config",
        "demo",
        "chaos",
    ):
        assert main([*command.split(), "--help"]) == 0
    assert main(["--version"]) == 0


def test_flags_reach_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("ep_server.cli.app.run", lambda config, *_: seen.append(config) or 0)
    monkeypatch.setattr("ep_server.logs.configure", lambda _: None)
    file = tmp_path / "c.toml"
    file.write_text("[scheduler]\nmax_queue = 5\nmax_running = 6\n")
    flags = ["--model", "m", "--ranks", "3", "--port", "0", "--scheduler-max-running", "7"]
    more = ["--scheduler-prefix-cache", "false", "--exchange-timeout-seconds", "1.5", "--config", str(file)]
    assert main(["serve", *flags, *more]) == 0
    (config,) = seen
    assert (config.model.path, config.parallel.ranks, config.grpc.port) == ("m", 3, 0)
    assert (config.scheduler.max_queue, config.scheduler.max_running) == (5, 7)
    assert config.scheduler.prefix_cache is False and config.exchange.timeout_seconds == 1.5


@pytest.mark.parametrize("command", [("generate", "hello"), ("bench", "online", "--requests", "1")])
def test_no_server_is_one_line(command: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken and not listening: nobody else can be there
        assert main([*command, "--address", f"127.0.0.1:{free.getsockname()[1]}"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("ep-server: error: UNAVAILABLE: failed to connect") and err.count("\n") == 1


@pytest.mark.parametrize("command", [("serve", "--model", str(DEMO_MODEL), "--ranks", "2"), ("demo",)])
def test_too_few_open_files_are_one_line(command: tuple[str, ...]) -> None:
    few = ["bash", "-c", 'ulimit -n 24; exec "$@"', "few"]
    line = [*few, sys.executable, "-m", "ep_server", *command]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=4 * WAIT)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"ep-server: error: limit of open files \(ulimit -n\) = 24: must be at least \d+ with \d ranks here, "
        r"and one more for each connection\n",
        done.stderr,
    ), done.stderr
