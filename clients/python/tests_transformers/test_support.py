"""What both test files of transformers use, and refusals by name."""

import pathlib
import re
import warnings

import pytest
import torch
from conftest import random_model
from transformers import DynamicCache

import kvd
import kvd.transformers


@torch.no_grad()
def generate(model, ids, cache, new_tokens, mask=None, **options):
    """Greedy tokens after the prompt."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        **options,
    )
    return out[:, ids.shape[1] :]


def stock(model, ids, new_tokens, mask=None, **options):
    """The same without kvd."""
    model.set_attn_implementation("sdpa" if "soft" not in str(options) else "eager")
    return generate(model, ids, DynamicCache(config=model.config), new_tokens, mask, **options)


def padded(ids, lengths, total):
    """Prompts of some lengths, cut out of `ids` and padded on the left."""
    rows = torch.zeros(len(lengths), total, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for row, length in enumerate(lengths):
        rows[row, total - length :] = ids[row * total : row * total + length]
        mask[row, total - length :] = 1
    return rows, mask


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mistral", {"sliding_window": 64}, "sliding window"),
        ("llama", {"model_type": "newllama"}, '"newllama" is not one of'),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        (
            "qwen2",
            {"layer_types": ["chunked_attention", "full_attention"] * 2},
            "chunked_attention",
        ),
    ],
)
def test_models_that_are_not_served_are_refused_by_name(client, name, changes, text):
    model = random_model(name)
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(kvd.Unsupported, match=text):
        kvd.transformers.KvdCache(model, client)


def test_calls_that_are_not_served_are_refused(client):
    model = random_model("llama")
    ids = torch.arange(1, 81)[None].repeat(2, 1)
    right = torch.ones_like(ids)
    right[1, 70:] = 0
    with kvd.transformers.KvdCache(model, client, codec="raw", keep=16, flush=16) as cache:
        for wrong in (
            {"attention_mask": right},
            {"attention_mask": torch.zeros(2, 1, 80, 80)},
            {"output_attentions": True},
        ):
            with pytest.raises(kvd.Unsupported), torch.no_grad():
                model(ids, past_key_values=cache, **wrong)
            assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match="negative"):
            cache.crop(5)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            with pytest.raises(kvd.InvalidArgument, match="a batch of 1 for a cache of 2"):
                model(ids[:1], past_key_values=cache)
    for wrong in ({"mode": "some"}, {"keep": -1}, {"flush": 0}, {"layers": [9]}, {"layers": []}):
        with pytest.raises(kvd.InvalidArgument):
            kvd.transformers.KvdCache(model, client, **wrong)
    with pytest.raises(kvd.InvalidCodec):
        kvd.transformers.KvdCache(model, client, codec="kivi4")


def test_a_full_pool_ends_the_step_and_empties_the_cache(trained):
    model, ids = trained
    with kvd.serve(pool="1 MiB", settings={"device.threads": 1}) as small:
        with small.connect() as client:
            cache = kvd.transformers.KvdCache(model, client, codec="raw")
            with pytest.raises(kvd.PoolFull):
                generate(model, ids[:1500][None], cache, 4)
            assert cache.get_seq_length() == 0 and client.sequences() == []
            want = stock(model, ids[:150][None], 8)
            model.set_attn_implementation("kvd")
            assert torch.equal(generate(model, ids[:150][None], cache, 8), want)


def test_options_of_a_cache_are_refused_one_by_one(client):
    model = random_model("llama")
    for options, said in (
        ({"mode": "foo"}, "mode='foo' is tail or all"),
        ({"keep": -1}, "keep = -1 is not from 0 to 4294967295"),
        ({"keep": 1.5}, "keep = 1.5: give an integer"),
        ({"flush": 0}, "flush = 0: at least one token goes to kvd at a time"),
    ):
        with pytest.raises(kvd.InvalidArgument) as raised:
            kvd.transformers.KvdCache(model, client, codec="raw", **options)
        assert str(raised.value) == f"INVALID_ARGUMENT: {said}"


def test_the_call_of_the_page_warns_of_nothing(client):
    page = pathlib.Path(__file__).parents[3] / "docs/engines/transformers.md"
    (call,) = re.findall(r"^ +tokens = (model\.generate\(.*\))$", page.read_text(), re.M)
    call = call.replace("max_new_tokens=200", "max_new_tokens=3")
    model, ids = random_model("llama"), torch.arange(1, 11)[None]
    with kvd.transformers.KvdCache(model, client, codec="raw") as cache, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        names = {"model": model, "cache": cache, "inputs": {"input_ids": ids}}
        assert eval(call, names).shape == (1, 13)
