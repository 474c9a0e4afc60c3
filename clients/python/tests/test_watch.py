"""Watches of the cache, and the bridge that tells routers of them."""

import threading
import time
import types

import numpy as np
import pytest
from conftest import SETTINGS

import kvd

pytest.importorskip("grpc")

GEOMETRY = kvd.Geometry(layers=1, kv_heads=1, head_dim_k=32)
PAGE, ENGINE_BLOCK = 64, 16


def keys_of(name, pages):
    return kvd.Keys.of([f"{name}-{at:05}".encode() for at in range(pages * 4)], ENGINE_BLOCK)


def page_keys(name, pages):
    return tuple(f"{name}-{at * 4 + 3:05}".encode() for at in range(pages))


def publish(model, name, pages):
    rows = np.ones((pages * PAGE, 1, 32), np.float32)
    with model.open() as sequence:
        sequence.store(0, rows, rows)
        assert sequence.publish(0, keys_of(name, pages)).length == pages * PAGE


@pytest.fixture
def client(server):
    with kvd.connect(server.unix) as connected:
        yield connected


@pytest.fixture
def name(request):
    # A model of the test's own.
    return request.node.name.replace("_", "-")


def draw(watch, model, picture, until):
    """Applies what a watch tells of a model to a picture, until it is whole and as wanted."""
    for update in watch:
        if update.reset:
            picture.clear()
        told = [event for event in update.events if event.model == model]
        for event in told:
            if event.change is kvd.Change.CLEARED:
                picture.clear()
            for key in event.keys:
                if event.change is kvd.Change.STORED:
                    picture.add((event.tier, key))
                else:
                    picture.discard((event.tier, key))
        if update.number and told and until(picture):
            return update, told
    raise AssertionError("a watch ends with an error")


def pool(*keys):
    return {(kvd.Tier.POOL, key) for key in keys}


def test_a_watch_tells_what_is_there_and_what_changes_and_goes_on_where_it_ended(client, name):
    model = client.model(name, GEOMETRY, dtype="f32", codec="raw")
    publish(model, "a", 2)
    picture = set()
    with client.watch_blocks() as watch:
        known = page_keys("a", 2)
        update, (event, *_) = draw(watch, name, picture, lambda of: of == pool(*known))
        assert (event.model, event.keys, event.block_tokens) == (name, known, PAGE)
        assert (event.parent_key, event.position, update.reset) == (b"", 0, True)
        position = watch.position
    publish(model, "b", 1)
    model.drop([keys_of("a", 2)])
    with client.watch_blocks(position) as watch:
        update, _ = draw(watch, name, picture, lambda of: of == pool(*page_keys("b", 1)))
        assert not update.reset


def test_a_region_carries_no_watch(region_client):
    with pytest.raises(kvd.Unsupported, match="unix:PATH"):
        region_client.watch_blocks()


# The bridge.


class RunningBridge:
    def __init__(self, server, model, **options):
        from kvd.kv_events import Bridge, BridgeOptions, EventForm

        def open_watch(after):
            return kvd.BlockWatch.connect(server.unix, after=after)

        options = {"listen": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", **options}
        self.bridge = Bridge(open_watch, EventForm(model), BridgeOptions(**options))
        self.events, self.replay = self.bridge.addresses
        self.thread = threading.Thread(target=self.bridge.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.bridge.stop()
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


def decoder_of_batches():
    """vLLM's own decoder of event batches where it is installed, else one that looks alike."""
    import msgspec
    from msgspec.structs import asdict

    try:
        from vllm.distributed.kv_events import KVEventBatch
    except ImportError:
        print("SKIP vllm: its classes decode nothing here")

        def decode(payload):
            _, events = msgspec.msgpack.decode(payload)
            return [types.SimpleNamespace(**event) for event in events]

        return decode
    decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def decode_by_vllm(payload):
        events = decoder.decode(payload).events
        return [types.SimpleNamespace(type=type(of).__name__, **asdict(of)) for of in events]

    return decode_by_vllm


class Router:
    """Reads the frames as a router does, with vLLM's own types where it is installed."""

    def __init__(self, bridge):
        import zmq

        self.bridge, self.decode = bridge, decoder_of_batches()
        self.sub = zmq.Context.instance().socket(zmq.SUB)
        self.sub.setsockopt(zmq.LINGER, 0)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(bridge.events)
        self.blocks, self.parents, self.next = set(), {}, 0

    def take(self, topic, number, payload):
        number, events = int.from_bytes(number, "big"), self.decode(payload)
        clears = events[0].type == "AllBlocksCleared"
        if number < self.next or (number > self.next and not clears):
            return  # seen before, or behind a gap that a replay fills
        self.next = number + 1
        for event in events:
            kind = event.type
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                continue
            blocks = {(event.medium, bytes(key)) for key in event.block_hashes}
            if kind == "BlockStored":
                assert (event.block_size, event.token_ids, event.lora_id) == (PAGE, [], None)
                parent = event.parent_block_hash
                for key in event.block_hashes:
                    self.parents[bytes(key)], parent = parent, key
                self.blocks |= blocks
            else:
                self.blocks -= blocks

    def read_until(self, wanted):
        deadline = time.monotonic() + 30
        while self.blocks != wanted:
            assert time.monotonic() < deadline, (self.blocks, wanted)
            if self.sub.poll(100):
                self.take(*self.sub.recv_multipart())
                continue
            for frames in replayed(self.bridge, self.next):
                self.take(*frames[1:])

    def close(self):
        self.sub.close()


def replayed(bridge, start):
    """Frames of a replay."""
    import zmq

    with zmq.Context.instance().socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.RCVTIMEO, 20_000)
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(bridge.replay)
        asker.send_multipart((b"", start.to_bytes(8, "big")))
        frames = []
        while True:
            frame = asker.recv_multipart()
            if frame[2] == (-1).to_bytes(8, "big", signed=True):
                return frames
            frames.append(frame)


@pytest.fixture
def router_tools():
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")


def cpu(*keys):
    return {("CPU", key) for key in keys}


def test_a_router_draws_the_picture_from_vllms_frames(server, client, name, router_tools):
    model = client.model(name, GEOMETRY, dtype="f32", codec="raw")
    other = client.model(f"{name}-2", GEOMETRY, dtype="f32", codec="raw")
    publish(model, "a", 3)
    publish(other, "x", 1)
    with RunningBridge(server, name) as bridge:
        router, known = Router(bridge), page_keys("a", 3)
        router.read_until(cpu(*known))
        assert router.parents[known[0]] is None
        assert [bytes(router.parents[key]) for key in known[1:]] == list(known[:2])
        publish(model, "b", 1)
        publish(other, "y", 1)
        model.drop([keys_of("a", 3)])
        router.read_until(cpu(*page_keys("b", 1)))
        # All of it again, numbered without a gap.
        numbers = [int.from_bytes(frames[2], "big") for frames in replayed(bridge, 0)]
        assert numbers == list(range(router.next))
        router.close()


def test_what_is_not_kept_is_told_anew_to_everyone(server, client, name, router_tools):
    model = client.model(name, GEOMETRY, dtype="f32", codec="raw")
    publish(model, "a", 1)
    with RunningBridge(server, name, buffer=2, anew_seconds=0.0) as bridge:
        early = Router(bridge)
        early.read_until(cpu(*page_keys("a", 1)))
        texts = [f"b{at}" for at in range(4)]
        for text in texts:
            publish(model, text, 1)
        wanted = cpu(*page_keys("a", 1), *[page_keys(text, 1)[0] for text in texts])
        early.read_until(wanted)
        # Its beginning is gone: the daemon is asked again.
        late = Router(bridge)
        late.read_until(wanted)
        for router in (early, late):
            router.close()


def test_a_daemon_that_ends_takes_its_blocks_along(router_tools):
    with kvd.serve(pool="64 MiB", settings=SETTINGS) as own:
        with RunningBridge(own, "told") as bridge:
            router = Router(bridge)
            for _ in range(2):
                with kvd.connect(own.unix) as client:
                    model = client.model("told", GEOMETRY, dtype="f32", codec="raw")
                    publish(model, "a", 2)
                    router.read_until(cpu(*page_keys("a", 2)))
                    own.kill()
                router.read_until(set())
                own.restart()
            router.close()


def test_the_bridge_ends_where_the_daemon_refuses_for_good(router_tools):
    from kvd.kv_events import Bridge, BridgeOptions, EventForm

    def refused(_):
        raise kvd.LimitExceeded("cache.events.watchers_max is 64")

    bridge = Bridge(refused, EventForm("told"), BridgeOptions("tcp://127.0.0.1:*"))
    with pytest.raises(kvd.LimitExceeded, match="watchers_max"):
        bridge.run()
