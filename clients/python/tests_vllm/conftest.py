"""A daemon, a small model with random weights on disk, and vLLM in this process."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    OMP_NUM_THREADS="1",
)

import random
import threading

import pytest
import torch
import transformers

import kvd
import kvd.vllm

vllm = pytest.importorskip("vllm")

SETTINGS = {
    "device.threads": 1,
    "log.filter": "warn,kvd::daemon=info",
    "namespaces.allowed": '["*"]',
}
BLOCK = 32
NEW_TOKENS = 24


def save_model(folder, seed=0, kind="llama"):
    """A model that is sharp enough that its tokens differ."""
    shape = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    configs = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    if kind == "mistral":
        shape["sliding_window"] = 96
    if kind == "gemma3":
        shape |= {"sliding_window": 96, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
        shape["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config, model = configs[kind]
    model(config(**shape)).eval().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


# Tokens that the last two prompts share. Where a machine is slow, the last one begins after the one
# before has stored them, and finds them.
SHARED = 320


def prompts():
    """Of many lengths; the last two share tokens."""
    draw = random.Random(0)

    def some(count):
        return [draw.randrange(3, 512) for _ in range(count)]

    shared = some(SHARED)
    return [some(100), some(333), some(600), some(1500), shared + some(40), shared + some(40)]


def make_llm(folder, transfer=None, **options):
    every = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "block_size": BLOCK,
        "seed": 0,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 256,
        **options,
    }
    return vllm.LLM(model=folder, kv_transfer_config=transfer, **every)


def generate(llm, asked, tokens=NEW_TOKENS, **options):
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
    )
    answers = llm.generate([{"prompt_token_ids": one} for one in asked], sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


class Engine:
    """vLLM with the connector, in this process, and both halves of it."""

    def __init__(self, folder, server, options=None, **engine):
        transfer = kvd.vllm.transfer_config(server.region, **(options or {}))
        self.llm = make_llm(folder, transfer, **engine)
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler.connector
        self.worker = get_kv_transfer_group()

    def totals(self):
        sums = self.scheduler.counters.total()
        return {name: sums[name] + value for name, value in self.worker.counters.total().items()}

    def counted(self, asked, **options):
        """Tokens, and what the connector did for them."""
        before = self.totals()
        tokens = generate(self.llm, asked, **options)
        self.settle()
        return tokens, {name: value - before[name] for name, value in self.totals().items()}

    def settle(self):
        """Waits until what was copied out is stored."""
        done = threading.Event()
        self.worker.worker.transfers._stores.put(done.set)
        assert done.wait(30)

    def forget(self):
        """vLLM drops all prefixes."""
        assert self.llm.reset_prefix_cache()

    def close(self):
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def server():
    with kvd.serve(pool="512 MiB", settings=SETTINGS) as running:
        yield running


@pytest.fixture
def engine(model_folder, server):
    """Makes engines, one after another: vLLM has one connector in a process."""
    made = []

    def make(folder=model_folder, **options):
        for one in made:
            one.close()
        made.append(Engine(folder, server, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def answer_without(folder, asked, **options):
    """Tokens of vLLM without the connector, where no engine is open."""
    llm = make_llm(folder)
    tokens = generate(llm, asked, **options)
    llm.llm_engine.engine_core.shutdown()
    return tokens


@pytest.fixture(scope="session")
def stock(model_folder):
    """Tokens of vLLM without the connector: cold, and of a second turn."""
    asked = prompts()
    cold = answer_without(model_folder, asked)
    turn = [a + b + [7, 8, 9] for a, b in zip(asked, cold, strict=True)]
    return {
        "asked": asked,
        "cold": cold,
        "turn": turn,
        "second": answer_without(model_folder, turn),
    }
