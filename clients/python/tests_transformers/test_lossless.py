"""With `raw` in f32 every greedy token is that of stock transformers, however it is generated."""

import pytest
import torch
from conftest import RANDOM, random_model
from test_support import generate, padded, stock

import kvd
import kvd.transformers

MODES = [{"mode": "tail", "keep": 64}, {"mode": "tail", "keep": 16, "flush": 16}, {"mode": "all"}]


def lossless(model, client, **options):
    return kvd.transformers.KvdCache(model, client, codec="raw", **options)


@pytest.mark.parametrize("options", MODES)
def test_one_and_three_padded_sequences(trained, client, options):
    model, ids = trained
    one = ids[:300][None]
    three, mask = padded(ids, (257, 187, 244), 257)
    want = stock(model, one, 96), stock(model, three, 96, mask)
    with lossless(model, client, **options) as cache:
        assert torch.equal(generate(model, one, cache, 96), want[0])
        held = cache.describe()[0].length
        assert held == 395 if options["mode"] == "all" else held > 200
        cache.reset()
        assert torch.equal(generate(model, three, cache, 96, mask), want[1])
        lengths = [state.length for state in cache.describe()]
        assert lengths[0] - lengths[1] == 70 and lengths[0] - lengths[2] == 13


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("name", RANDOM)
def test_every_supported_class(client, name, options):
    model = random_model(name)
    ids = torch.randint(3, 512, (600,), generator=torch.Generator().manual_seed(1))
    prompts, mask = padded(ids, (190, 77), 190)
    model.set_attn_implementation("eager" if "soft-cap" in name else "sdpa")
    from transformers import DynamicCache

    want = generate(model, prompts, DynamicCache(config=model.config), 64, mask)
    assert len(set(want[0].tolist())) > 8, "a model whose tokens repeat proves little"
    with lossless(model, client, **options) as cache:
        assert torch.equal(generate(model, prompts, cache, 64, mask), want)
        assert cache.describe()[0].length > 100


def test_without_what_kvd_holds_the_tokens_differ(trained, client, monkeypatch):
    """A control: the other tests would notice."""
    model, ids = trained
    want = stock(model, ids[:300][None], 32)
    from kvd.transformers.attention import Asked

    whole = Asked.attend_locally

    def forgetful(self, remote):
        if remote is not None:
            remote.result()
            self.soft_cap = 1e9
        return whole(self, None)

    monkeypatch.setattr(Asked, "attend_locally", forgetful)
    with lossless(model, client) as cache:
        assert not torch.equal(generate(model, ids[:300][None], cache, 32), want)


@pytest.mark.parametrize("options", MODES)
def test_chunked_prefill_with_padding(trained, client, options):
    model, ids = trained
    prompts, mask = padded(ids, (200, 50, 130), 200)
    want = stock(model, prompts, 48, mask)
    model.set_attn_implementation("kvd")
    with lossless(model, client, **options) as cache:
        with torch.no_grad():
            for end in (64, 128, 199):
                begin = cache.get_seq_length()
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, begin:end]
                model(
                    prompts[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions,
                    past_key_values=cache,
                )
        assert torch.equal(generate(model, prompts, cache, 48, mask), want)


@pytest.mark.parametrize("options", MODES)
def test_long_steps_go_in_pieces(trained, client, options, monkeypatch):
    """A step whose queries and rows fit neither a region nor a message at once."""
    from kvd.transformers import attention

    model, ids = trained
    prompts, mask = padded(ids, (600, 390), 600)
    want = stock(model, prompts, 16, mask)
    monkeypatch.setattr(attention, "_PIECE_BYTES", 100_000)
    client.link().store_bytes_max = 50_000
    with lossless(model, client, **options) as cache:
        got = generate(model, prompts, cache, 16, mask, prefill_chunk_size=250)
        lengths = [state.length for state in cache.describe()]
    assert torch.equal(got, want)
    assert lengths[0] - lengths[1] == 210


def test_generate_in_prefill_chunks(trained, client):
    model, ids = trained
    want = stock(model, ids[:500][None], 32)
    with lossless(model, client) as cache:
        got = generate(model, ids[:500][None], cache, 32, prefill_chunk_size=128)
    assert torch.equal(got, want)


@pytest.mark.parametrize("layers", [[0], [1], [0, 2]])
def test_some_layers_in_kvd_and_others_here(trained, client, layers):
    model, ids = trained
    prompts, mask = padded(ids, (150, 100), 150)
    want = stock(model, prompts, 48, mask)
    with lossless(model, client, layers=layers, keep=16, flush=16) as cache:
        assert torch.equal(generate(model, prompts, cache, 48, mask), want)
        assert len(cache.describe()[0].layer_lengths) == len(layers)


@pytest.mark.parametrize("options", MODES)
def test_beams_are_forks(trained, client, options):
    model, ids = trained
    want = stock(model, ids[2000:2200][None], 48, num_beams=4)
    with lossless(model, client, **options) as cache:
        assert torch.equal(generate(model, ids[2000:2200][None], cache, 48, num_beams=4), want)
        assert len(client.sequences()) == 4


@pytest.mark.parametrize("options", [*MODES, {"mode": "tail", "keep": 0, "flush": 16}])
def test_prompt_lookup_rolls_back(trained, client, options, monkeypatch):
    model, ids = trained
    prompt = ids[2000:2400][None]
    want = stock(model, prompt, 96)
    truncations = []
    real = kvd.Sequence.truncate
    monkeypatch.setattr(
        kvd.Sequence, "truncate", lambda self, n: (truncations.append(n), real(self, n))
    )
    with lossless(model, client, **options) as cache:
        got = generate(model, prompt, cache, 96, prompt_lookup_num_tokens=8)
    assert torch.equal(got, want)
    if options.get("keep", 0) == 0:
        assert truncations, "no roll-back has reached kvd"


def test_assisted_decoding(client):
    model, assistant = random_model("llama"), random_model("llama", seed=0)
    with torch.no_grad():
        for weight in assistant.model.layers[3].parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    ids = torch.randint(3, 512, (1, 150), generator=torch.Generator().manual_seed(3))
    want = stock(model, ids, 64)
    with lossless(model, client, keep=0, flush=16) as cache:
        assert torch.equal(generate(model, ids, cache, 64, assistant_model=assistant), want)


def test_gemma3_rolls_back_its_sliding_layers(client):
    model = random_model("gemma3")
    ids = torch.randint(3, 512, (1, 150), generator=torch.Generator().manual_seed(3))
    want = stock(model, ids, 48)
    with lossless(model, client, keep=0, flush=16) as cache:
        assert torch.equal(generate(model, ids, cache, 48, prompt_lookup_num_tokens=4), want)


@pytest.mark.parametrize("options", MODES)
def test_a_prefix_and_its_forks(trained, client, options):
    model, ids = trained
    suffixes = [ids[1000 + 50 * n : 1033 + 50 * n] for n in range(3)]
    prompts = [torch.cat([ids[:384], suffix])[None] for suffix in suffixes]
    want = [stock(model, prompt, 48) for prompt in prompts]
    model.set_attn_implementation("kvd")
    with lossless(model, client, **options) as base:
        with torch.no_grad():
            model(ids[:384][None], past_key_values=base)
        for prompt, tokens in zip(prompts, want, strict=True):
            with base.fork() as child:
                assert child.get_seq_length() == 384
                assert torch.equal(generate(model, prompt, child, 48), tokens)
        assert base.get_seq_length() == 384
        assert torch.equal(generate(model, prompts[0], base, 48), want[0])


def test_a_batch_is_repeated_and_thinned(trained, client):
    model, ids = trained
    prompts, mask = padded(ids, (120, 80), 120)
    want = stock(model, prompts, 16, mask)
    model.set_attn_implementation("kvd")
    with lossless(model, client, keep=16, flush=16) as cache:
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :119]
            model(
                prompts[:, :119],
                attention_mask=mask[:, :119],
                position_ids=positions,
                past_key_values=cache,
            )
        cache.batch_repeat_interleave(2)
        assert len(client.sequences()) == 4
        cache.batch_select_indices(torch.tensor([3, 0]))
        assert len(client.sequences()) == 2
        order = torch.tensor([1, 0])
        got = generate(model, prompts[order], cache, 16, mask[order])
    assert torch.equal(got, want[order])


def test_a_second_turn_continues_the_cache(trained, client):
    model, ids = trained
    first, second = ids[:200][None], ids[500:530][None]
    with lossless(model, client) as cache:
        answer = generate(model, first, cache, 32)
        whole = torch.cat([first, answer, second], 1)
        got = generate(model, whole, cache, 32)
    assert torch.equal(got, stock(model, whole, 32))


def test_crop_puts_the_cache_back(trained, client):
    model, ids = trained
    with lossless(model, client, keep=0, flush=16) as cache:
        before = generate(model, ids[:200][None], cache, 32)
        cache.crop(-(cache.get_seq_length() - 150))
        assert cache.get_seq_length() == 150
        assert max(state.length for state in cache.describe()) <= 150
        assert torch.equal(generate(model, ids[:200][None], cache, 32), before)
