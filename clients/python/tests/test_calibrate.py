"""A calibration by the daemon: registered, better than none, and refused by name."""

import numpy as np
import pytest

import kvd

LAYERS, HEADS, DIM, TOKENS = 2, 2, 32, 512
GEOMETRY = kvd.Geometry(LAYERS, HEADS, DIM)


def fill(model, rng, is_attended=True):
    """A sequence whose channels differ in size, and queries of it."""
    sequence = model.open()
    sizes = np.exp(rng.standard_normal(DIM)).astype(np.float32)
    rows = [
        (rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32) * sizes) for _ in range(4)
    ]
    sequence.store_layers(rows[:2], rows[2:])
    if is_attended:
        for layer in range(LAYERS):
            q = rng.standard_normal((256, 4, DIM)).astype(np.float32)
            model.attend(layer, [kvd.Query(sequence, 256)], q)
    return sequence


def test_a_calibration_is_made_and_registered(client, rng):
    # Queries are counted by model: each test has its own.
    name = f"calibrated-{rng.integers(1 << 30)}"
    raw = client.model(name, GEOMETRY, dtype="f32", codec="raw")
    sequence = fill(raw, rng)
    made = raw.calibrate([sequence], ["kvd-2", "vecinfer-2"], seed=3)
    assert (made.tokens, made.queries_per_head) == (TOKENS, 512)
    assert raw.calibrate([sequence], ["kvd-2", "vecinfer-2"], seed=3) == made
    for codec in ("kvd-2", "vecinfer-2"):
        model = client.model(
            f"{name}-{codec}", GEOMETRY, dtype="f32", codec=codec, calibration=made.calibration
        )
        with model.open() as other:
            k, v = sequence.load(0)
            other.store_layers([k] * LAYERS, [v] * LAYERS)
            loaded, _ = other.load(0)
            assert np.sqrt(np.mean((loaded - k) ** 2)) < 0.5 * np.sqrt(np.mean(k**2))
    few = raw.calibrate([sequence], ["vecinfer-2"], tokens=200)
    assert few.tokens == 200
    sequence.close()


def test_what_does_not_serve_is_refused_by_name(client, rng):
    # Queries are counted by model: each test has its own.
    name = f"calibrated-{rng.integers(1 << 30)}"
    raw = client.model(name, GEOMETRY, dtype="f32", codec="raw")
    lossy = client.model(f"{name}-lossy", GEOMETRY, dtype="f32", codec="kivi-4")
    fresh = client.model(f"{name}-fresh", GEOMETRY, dtype="f32", codec="raw")
    with fill(raw, rng) as full, fill(fresh, rng, is_attended=False) as unseen:
        for model, asked, codecs, said in (
            (raw, [], ["kvd-2"], "no sequence"),
            (raw, [full], [], "codecs"),
            (raw, [full], ["kivi-4"], "needs no calibration"),
            (raw, [full], ["kvd-2", "kvd-3.5.1"], "kvd-3.5.1"),
            (raw, [full, raw.open()], ["kvd-2"], "no tokens"),
            (raw, [unseen], ["kvd-2"], "another model"),
            (fresh, [unseen], ["kvd-2"], "looks at queries"),
            (lossy, [full], ["kvd-2"], "codec raw"),
        ):
            with pytest.raises((kvd.InvalidArgument, kvd.InvalidCodec), match=said):
                model.calibrate(asked, codecs)
        with pytest.raises(kvd.InvalidArgument, match="at least"):
            raw.calibrate([full], ["kvd-2"], tokens=64)
