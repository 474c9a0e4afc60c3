"""Tells routers which blocks a daemon has, in the frames in which vLLM tells of its own
(needs pyzmq, msgspec and grpcio):

    python -m kvd.kv_events --daemon 127.0.0.1:7070 --model llama --listen tcp://127.0.0.1:5557

It publishes one model of one namespace on a PUB socket: topic, number (8 bytes, big-endian), and a
msgpack batch of BlockStored, BlockRemoved and AllBlocksCleared. With `--replay` a ROUTER socket
answers a number with all batches from it on that are kept. A batch that begins with
AllBlocksCleared is followed by all blocks there are: a router that comes late asks for number 0, or
waits; where the batches from 0 on are gone, all blocks are told anew, to everyone.

Events have no token ids: the daemon knows keys alone. A block is a page of kvd (64 tokens) under
the key of its last engine block.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from .credentials import Credentials
from .errors import KvdError, LimitExceeded, PermissionDenied, Unauthenticated, Unsupported
from .watch import BlockEvent, BlockUpdate, BlockWatch, Change, Tier, WatchPosition

try:
    import msgspec
    import zmq
except ImportError as missing:  # pragma: no cover
    raise ImportError(
        "the bridge needs pyzmq and msgspec: pip install pyzmq msgspec grpcio"
    ) from missing

_log = logging.getLogger("kvd.kv_events")

# Number of what ends a replay.
_END = (-1).to_bytes(8, "big", signed=True)
# Answers of the daemon that wait to be published; past that the daemon keeps them, within its own
# limits.
_ANSWERS_AHEAD = 16
_POLL_SECONDS = 0.02
_WAIT_MIN, _WAIT_MAX = 0.1, 5.0

BlockHash = bytes | int


# An event is a map with its name under "type", as vLLM's classes of these names are encoded.
WireEvent = dict[str, Any]
_CLEARED: WireEvent = {"type": "AllBlocksCleared"}


def _plain_hash(key: bytes) -> BlockHash:
    return key


def _low_64_bits(key: bytes) -> BlockHash:
    """As vLLM does with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""
    return int.from_bytes(key[-8:], "big")


@dataclass(frozen=True)
class EventForm:
    """How events are written."""

    model: str
    # Names of tiers, as the router knows them.
    media: dict[Tier, str] = field(
        default_factory=lambda: {Tier.POOL: "CPU", Tier.DISK: "DISK", Tier.REMOTE: "EXTERNAL"}
    )
    hash_of: Callable[[bytes], BlockHash] = _plain_hash

    def events_of(self, update: BlockUpdate) -> list[WireEvent]:
        """What a router is to be told of an update; nothing where it is of other models."""
        events = [_CLEARED] if update.reset else []
        return events + [self._write(event) for event in update.events if event.model == self.model]

    def _write(self, event: BlockEvent) -> WireEvent:
        if event.change is Change.CLEARED or event.tier is None:
            return _CLEARED
        hashes, medium = [self.hash_of(key) for key in event.keys], self.media[event.tier]
        if event.change is Change.REMOVED:
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": self.hash_of(event.parent_key) if event.parent_key else None,
            "token_ids": [],
            "block_size": event.block_tokens,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }


@dataclass(frozen=True)
class BridgeOptions:
    """Where the bridge listens, and what it keeps."""

    listen: str
    replay: str | None = None
    topic: str = ""
    # Batches that are kept for replays.
    buffer: int = 10_000
    # Batches that wait for a subscriber that does not read; more are lost to it.
    hwm: int = 100_000
    # How often all blocks are told anew at most because somebody asked for what is gone.
    anew_seconds: float = 10.0


class Bridge:
    """Publishes what a watch tells. One thread reads the daemon, `run` does the rest."""

    def __init__(
        self,
        open_watch: Callable[[WatchPosition | None], BlockWatch],
        form: EventForm,
        options: BridgeOptions,
    ) -> None:
        self._open_watch, self._form, self._options = open_watch, form, options
        self._updates: queue.Queue[BlockUpdate | Exception] = queue.Queue(_ANSWERS_AHEAD)
        self._stop, self._anew = threading.Event(), threading.Event()
        self._watch: BlockWatch | None = None
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.buffer)
        self._next, self._told_anew = 0, float("-inf")
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets = contextlib.ExitStack()
        context = self._sockets.enter_context(zmq.Context())
        self._pub = self._bind(context, zmq.PUB, options.listen)
        self._replay = self._bind(context, zmq.ROUTER, options.replay) if options.replay else None

    def _bind(self, context: Any, kind: int, address: str) -> Any:
        socket = self._sockets.enter_context(context.socket(kind))
        socket.set_hwm(self._options.hwm)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    @property
    def addresses(self) -> tuple[str, str | None]:
        """Where the sockets are, also where the system chose the port."""
        bound = [
            None if socket is None else socket.getsockopt_string(zmq.LAST_ENDPOINT)
            for socket in (self._pub, self._replay)
        ]
        return str(bound[0]), bound[1]

    def run(self) -> None:
        """Publishes until `stop`. Raises what the daemon refuses for good."""
        reader = threading.Thread(target=self._read_daemon, name="kvd-watch", daemon=True)
        reader.start()
        try:
            while not self._stop.is_set():
                self._answer_replays()
                try:
                    update = self._updates.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(update, Exception):
                    raise update
                events = self._form.events_of(update)
                if events:
                    self._publish(events)
        finally:
            self.stop()
            reader.join(timeout=_WAIT_MAX)
            self._sockets.close()

    def stop(self) -> None:
        """Ends `run`, from any thread."""
        self._stop.set()
        watch = self._watch
        if watch is not None:
            watch.close()

    def _publish(self, events: list[WireEvent]) -> None:
        # A batch is an array: its time and its events.
        payload, number = self._encoder.encode([time.time(), events]), self._next
        self._next += 1
        self._kept.append((number, payload))
        self._pub.send_multipart((self._options.topic.encode(), number.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        """Answers those who ask for batches from a number on."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("a replay was asked for in %d frames, not 3", len(frames))
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in list(self._kept):
                if number >= start:
                    self._send_replay(client, number.to_bytes(8, "big"), payload)
            self._send_replay(client, _END, b"")
            first = self._kept[0][0] if self._kept else self._next
            now = time.monotonic()
            if start < first and now - self._told_anew >= self._options.anew_seconds:
                self._told_anew = now
                self._anew.set()
                if self._watch is not None:
                    self._watch.close()

    def _send_replay(self, client: bytes, number: bytes, payload: bytes) -> None:
        assert self._replay is not None
        topic = self._options.topic.encode() if payload else b""
        # One that does not read loses its answer, and delays nobody.
        with contextlib.suppress(zmq.Again):
            self._replay.send_multipart((client, b"", topic, number, payload), zmq.NOBLOCK)

    def _read_daemon(self) -> None:
        position: WatchPosition | None = None
        wait = _WAIT_MIN
        while not self._stop.is_set():
            try:
                self._watch = watch = self._open_watch(position)
                for update in watch:
                    position, wait = watch.position, _WAIT_MIN
                    if not self._put(update):
                        return
            except (LimitExceeded, PermissionDenied, Unauthenticated, Unsupported) as error:
                # No later call will do better.
                self._put(error)
                return
            except KvdError as error:
                if self._watch is not None:
                    self._watch.close()
                if self._stop.is_set():
                    return
                if self._anew.is_set():
                    self._anew.clear()
                    position = None
                    continue
                _log.warning("the daemon is asked again in %.1f s: %s", wait, error)
                if wait > _WAIT_MIN and position is not None:
                    # It is not there: neither are its blocks.
                    position = None
                    self._put(BlockUpdate("", 0, True, ()))
                self._stop.wait(wait)
                wait = min(wait * 2, _WAIT_MAX)

    def _put(self, update: BlockUpdate | Exception) -> bool:
        """Hands an update to `run`; False where that has ended."""
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._updates.put(update, timeout=_POLL_SECONDS)
                return True
        return False


def _read_media(texts: Iterable[str]) -> dict[Tier, str]:
    media = EventForm("").media
    for text in texts:
        tier, equals, name = text.partition("=")
        if not equals or tier.upper() not in Tier.__members__:
            raise argparse.ArgumentTypeError(f"--medium {text}: give pool=, disk= or remote=NAME")
        media[Tier[tier.upper()]] = name
    return media


def _parse(arguments: SequenceOf[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvd.kv_events", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--daemon", required=True, help="HOST:PORT, https://HOST:PORT or unix:PATH")
    add("--model", required=True, help="name of the model, as it is registered")
    add("--namespace", help="default: the daemon's default")
    add("--listen", default="tcp://127.0.0.1:5557", help="address of the PUB socket")
    add("--replay", help="address of the ROUTER socket; default: none")
    add("--topic", default="", help="first frame of each message")
    add("--hashes", choices=("bytes", "int"), default="bytes", help="how keys are written")
    add("--medium", action="append", default=[], metavar="TIER=NAME", help="pool, disk, remote")
    add("--buffer", type=int, default=10_000, help="batches kept for replays")
    add("--token-file", type=argparse.FileType(), help="a file with the bearer token")
    for name in ("ca", "cert", "key"):
        add(f"--{name}", help="PEM file, of https://")
    return parser.parse_args(arguments)


def main(arguments: SequenceOf[str] | None = None) -> int:
    """Runs the bridge until SIGINT or SIGTERM."""
    given = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    token = given.token_file.read().strip() if given.token_file else None
    shown = Credentials(token, given.ca, given.cert, given.key)
    try:
        media = _read_media(given.medium)
    except argparse.ArgumentTypeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    hash_of = _low_64_bits if given.hashes == "int" else _plain_hash
    bridge = Bridge(
        lambda after: BlockWatch.connect(
            given.daemon, namespace=given.namespace, after=after, credentials=shown
        ),
        EventForm(given.model, media, hash_of),
        BridgeOptions(given.listen, given.replay, given.topic, given.buffer),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: bridge.stop())
    _log.info("events of %s at %s, replays at %s", given.model, *bridge.addresses)
    try:
        bridge.run()
    except KvdError as error:
        _log.error("the daemon refuses: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
