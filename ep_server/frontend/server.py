"""[1] Lifecycle of one server: start, serve, drain, stop.

The gRPC port opens first: health then reports that the process works and that its services are NOT_SERVING.
The ranks load; then the services are SERVING.

The first SIGTERM or SIGINT of this process drains it, the second stops it at once. A stop requested by
another node counts as neither. A lost rank that is not replaced ends the server with exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from grpc import aio

from ep_server.config import Config
from ep_server.engine.balancer import balance_settings
from ep_server.engine.engine import Engine, EngineSettings
from ep_server.engine.observer import EngineObserver, NullObserver
from ep_server.engine.profiles import ProfileLimits
from ep_server.errors import EpServerError
from ep_server.frontend import control, health, service
from ep_server.frontend.call_metadata import Entrance
from ep_server.frontend.control import ControlService, open_control_port, refuse_control
from ep_server.frontend.doors import open_doors
from ep_server.frontend.endpoint import Certificates, warn_if_open
from ep_server.frontend.generation import Generator
from ep_server.frontend.handoffs import Handoffs
from ep_server.frontend.health import Health
from ep_server.frontend.introspection import add_channelz, add_reflection, channelz_names
from ep_server.frontend.messages import CallLimits
from ep_server.frontend.port import Port
from ep_server.frontend.requests import with_message_limit
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.service import DecodeService, generate_method
from ep_server.ranks.protocol import Ranks
from ep_server.stop_signals import stop_signals
from ep_server.text.grammars.compiler import GrammarCompiler
from ep_server.v1.control_pb2_grpc import add_ControlServicer_to_server
from ep_server.v1.decode_pb2_grpc import add_DecodeServicer_to_server

log = logging.getLogger(__name__)

Progress = Callable[[int, str, int, int], None]
LAST_WORDS_SECONDS = 2.0  # for statuses to reach their callers after the streams have ended


class OtherNodes(Protocol):
    """The other nodes of a server that this node leads (ep_server.cluster.leader)."""

    on_stop_asked: Callable[[], None]

    async def open(
        self, add_services: Callable[[aio.Server], None], limits: CallLimits | None = None
    ) -> None:
        """Opens the port that they connect to. add_services, limits: for calls that they relay.

        Raises: ConfigError.
        """
        ...

    def publish(self, *, serving: bool) -> None:
        """Publishes to them whether the server takes requests."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Ends them with this exit code, and the port. Idempotent."""
        ...


class Server:
    """One gRPC server in front of a group of ranks. Create and use it inside a running event loop."""

    def __init__(
        self,
        config: Config,
        model: ServedModel,
        ranks: Ranks,
        observer: EngineObserver | None = None,
        others: OtherNodes | None = None,
    ) -> None:
        self.config = config = with_message_limit(config, model.max_context, model.vocab_size)
        self.address = ""  # host:port once start() has bound it
        settings = EngineSettings(
            max_context=model.max_context,
            max_running=config.scheduler.max_running,
            max_queue=config.scheduler.max_queue,
            max_streams=config.grpc.max_streams,
            stream_buffer=config.grpc.stream_buffer,
            profiles=ProfileLimits(
                config.profile.directory, config.profile.max_seconds, config.profile.max_steps
            ),
            ranks_per_node=config.parallel.ranks,
            max_losses=config.resilience.max_losses,
            checkpoint=config.model.path,
            max_pause=config.exchange.timeout_seconds,
            balance=balance_settings(config.resilience),
            recover=config.resilience.on_rank_loss == "recover",
        )
        observer = observer or NullObserver()
        self.engine = Engine(ranks, settings, observer)
        generate = generate_method(self.engine, model, config.grpc.max_message_bytes)
        self._doors = open_doors(config, self.engine, model)
        methods = {service.GENERATE: generate}
        for door in self._doors:
            methods |= door.methods()
        self._limits = CallLimits(
            methods,
            config.grpc.max_streams,
            observer.on_refused,
            measured=service.GENERATE,
            on_accept_wait=observer.on_accept_wait,
        )
        self._model = model
        self._names = (
            *control.public_names(config.grpc),
            *(door.service.full_name for door in self._doors),
        )
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        self._handoffs = Handoffs(config, self.engine)
        self.health = Health(self._names)
        self._control = ControlService(self.engine, model, config, self._handoffs)
        self._port: Port | None = None
        self._control_port: Port | None = None
        self._others = others
        self._failure = ""
        self._signalled = False  # this process got a signal; a stop requested by another node does not count
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def certificates(self) -> Certificates | None:
        """Those of the public port; None without TLS, or before it is open."""
        return None if self._port is None else self._port.certificates

    async def run(
        self, progress: Progress, on_serving: Callable[[], None] = lambda: None, *, last: bool = False
    ) -> int:
        """Runs the server to its end; signals drain it. last: the process ends too: ignore later signals.

        Returns: exit code, 1 if a rank was lost and not replaced. Raises: StartupError.
        """
        with stop_signals(self.ask_to_stop, last=last):
            return await self.live(progress, on_serving)

    async def live(self, progress: Progress, on_serving: Callable[[], None]) -> int:
        """As run(), for a caller that handles signals itself and calls ask_to_stop()."""
        try:
            await self.start(progress)
            if self.health.serving:
                on_serving()
            await self.serve()
            await self.drain()
        except EpServerError as error:
            self._failure = str(error)
            raise
        finally:
            await self.stop()
        return 1 if self.engine.lost.is_set() else 0

    async def start(self, progress: Progress) -> None:
        """Opens the port, then starts the ranks. Returns early if a stop is requested meanwhile."""
        warn_if_open(self.config.grpc)
        self._port = self._make_port()
        self.address = await self._port.open()
        self._control_port = await open_control_port(self.config.grpc, self._add_control)
        if self._others is not None:
            self._others.on_stop_asked = self._stop_asked.set  # several nodes may ask: it still drains
            await self._others.open(self.add_relayed, self._limits)
        if await self._unless(self._stop_asked, self._start_ranks(progress)):
            self._say(serving=True)
            for named in sorted({ready.attention for ready in self.engine.ready} - {""}):
                log.info("decode attention: %s", named)
            if (fits := self.engine.max_context) < self._model.max_context:
                log.warning(
                    "a rank's KV cache holds %d tokens, the model %d: longer requests are refused; raise "
                    "scheduler.kv_blocks or kv_fraction",
                    fits,
                    self._model.max_context,
                )
            ranks = self.engine.num_ranks
            log.info(
                "serving %s on %s, %d %s on %s",
                self._model.name,
                self.address,
                ranks,
                "rank" if ranks == 1 else "ranks",
                self.config.parallel.device,
            )

    async def _start_ranks(self, progress: Progress) -> None:
        """And identifies the weights meanwhile, which reads a little of every tensor."""
        reading = asyncio.create_task(self._handoffs.warm_up())
        try:
            await self.engine.start(progress)
            await reading
        finally:
            reading.cancel()

    async def serve(self) -> None:
        """Waits until a stop is requested, or a rank is lost and not replaced."""
        await self._unless(self._stop_asked, self.engine.lost.wait())
        self._say(serving=False)

    async def drain(self) -> None:
        """Lets streams end within grpc.drain_seconds; ends the others with UNAVAILABLE."""
        if self.engine.lost.is_set():
            log.error("%s; ending all streams and stopping the server", self.engine.lost_message)
        elif self.engine.ready:
            streams = self.engine.statistics().open_streams
            log.info("draining, at most %g s: %d open streams", self.config.grpc.drain_seconds, streams)
            if self._port is not None and streams:
                self._port.drain(self._add_public)
            await self._unless(self._stop_now, self.engine.drain(self.config.grpc.drain_seconds))
        await self.engine.drain(0)
        await self._unless(self._stop_now, self.engine.streams_closed(LAST_WORDS_SECONDS))

    async def stop(self) -> None:
        """Closes the port, ends the ranks, then the other nodes. Idempotent."""
        self._say(serving=False)
        if self._port is not None:
            await self._port.close()
        if self._control_port is not None:
            await self._control_port.close()
        await self._grammars.close()
        await self.engine.stop()
        if self._others is not None:
            why = self.engine.lost_message if self.engine.lost.is_set() else self._failure
            await self._others.close(1 if why else 0, why)
        if self.engine.ready:
            log.info("stopped")

    def ask_to_stop(self) -> None:
        """Drains; a second call stops at once. Also drains if another node asked before."""
        (self._stop_now if self._signalled else self._stop_asked).set()
        self._signalled = True

    def _say(self, *, serving: bool) -> None:
        self.health.set(serving=serving)
        if self.engine.lost.is_set():
            self.health.fail()
        if self._others is not None:
            self._others.publish(serving=serving)

    def add_relayed(self, server: aio.Server) -> None:
        """Adds Decode and Control for calls that other nodes relay; only they may reach `server`."""
        self._add_services(server, relays=True)

    def _make_port(self) -> Port:
        port = Port(self.config.grpc, frozenset({health.SERVICE_NAME}), self._limits)
        self._add_public(port.server)
        return port

    def _add_public(self, server: aio.Server) -> None:
        self._add_services(server, relays=False)
        health.add_HealthServicer_to_server(self.health, server)
        names = [*self._names, health.SERVICE_NAME]
        if self.config.grpc.control == "on":
            add_channelz(server, self.config.grpc)
            names += channelz_names(self.config.grpc)
        add_reflection(server, self.config.grpc, names)

    def _add_services(self, server: aio.Server, *, relays: bool) -> None:
        entrance = Entrance(self.config.cluster.nodes, self.config.parallel.ranks, relays)
        generator = Generator(self.engine, self._model, self._grammars, self._handoffs, entrance)
        add_DecodeServicer_to_server(DecodeService(generator, self.config.grpc.unread_seconds), server)
        for door in self._doors:
            door.add_to(server, generator)
        allowed = ("on", "loopback") if relays else ("on",)  # other nodes relay their callers' requests
        if self.config.grpc.control in allowed:
            self._add_control(server)
        else:
            refuse_control(server, self.config.grpc)

    def _add_control(self, server: aio.Server) -> None:
        add_ControlServicer_to_server(self._control, server)

    @staticmethod
    async def _unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
        """Waits for `work`, or for `event`, which cancels it. Returns: whether `work` was done."""
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if not task.cancelled():
            await task  # raises its error
        return not task.cancelled()
