"""A daemon, a trained model of a few megabytes, and small random ones of each supported class."""

import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers

import kvd
import kvd.transformers

FIXTURE = pathlib.Path(__file__).parents[3] / "tests/fixtures/kv-tiny-b"
torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
kvd.transformers.register()
transformers.logging.set_verbosity_error()

RANDOM = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"sliding_window": None},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 48,
            "tie_word_embeddings": False,
        },
    ),
}
RANDOM["gemma3-soft-cap"] = (
    *RANDOM["gemma3"][:2],
    {**RANDOM["gemma3"][2], "attn_logit_softcapping": 5.0},
)


def random_model(name, seed=0, **changes):
    """A small model with random weights, sharp enough that its tokens differ."""
    config, kind, special = RANDOM[name]
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = kind(config(**{**shape, **special, **changes})).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def server():
    with kvd.serve(pool="512 MiB", settings={"device.threads": 1}) as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connected:
        yield connected
        left = connected.sequences()
        assert not left, "a cache that was closed has left sequences"


@pytest.fixture(scope="session")
def trained():
    """kv-tiny-b in f32, and held-out ids."""
    if not FIXTURE.exists():
        pytest.skip("not in a checkout")
    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURE, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    ids = np.fromfile(FIXTURE / "eval_ids.u16", "<u2").astype(np.int64)
    return model, torch.from_numpy(ids)
