"""What the connector costs where nothing hits, and what a prefix that vLLM dropped costs.

    KVD_BINARY=… python bench/vllm_prefix.py [--codec kivi-4] [--turns 8]

A random Llama in bf16 (12 layers, 768 wide, 4 KV heads of 64) in one vLLM with one thread. The
connector is switched on and off by turns: off it neither looks up nor stores. Processor time is the
engine's, all its threads; the daemon's is given beside it.
"""

import argparse
import os
import random
import statistics
import tempfile
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
)

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.distributed.kv_transfer import get_kv_transfer_group

import kvd
import kvd.vllm

PREFIX, TAIL = 1024, 32
DRAW = random.Random(0)


def make_model(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def some(count):
    return [DRAW.randrange(3, 4096) for _ in range(count)]


class Engine:
    def __init__(self, folder, server, codec):
        self.server = server
        self.llm = vllm.LLM(
            model=folder,
            kv_transfer_config=kvd.vllm.transfer_config(server.region, codec=codec),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=2048,
            block_size=64,
            max_num_batched_tokens=1024,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker, self.scheduler = get_kv_transfer_group(), core.scheduler.connector

    def switch(self, is_on):
        for side in (self.worker, self.scheduler):
            object.__setattr__(side.plan, "loads", is_on)
            object.__setattr__(side.plan, "stores", is_on)

    def run(self, asked, tokens):
        """Seconds on the wall, of the engine's processor time, and of the daemon's."""
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began, used, served = time.perf_counter(), time.process_time(), self.daemon_seconds()
        inputs = [{"prompt_token_ids": one} for one in asked]
        self.llm.generate(inputs, sampling, use_tqdm=False)
        wall, own = time.perf_counter() - began, time.process_time() - used
        return wall, own, self.daemon_seconds() - served

    def daemon_seconds(self):
        with open(f"/proc/{self.server.pid}/stat") as stat:
            fields = stat.read().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def forget(self):
        time.sleep(0.3)  # what is stored beside the engine is there
        assert self.llm.reset_prefix_cache()


def report(label, runs):
    for at, name in enumerate(("wall", "engine's processor time", "daemon's")):
        on, off = (statistics.median(one[at] for one in side) for side in runs)
        ratio = f", ratio {on / off:.3f}" if off else ""
        print(f"{label}, {name}: with {on * 1e3:.1f} ms, without {off * 1e3:.1f} ms{ratio}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--turns", type=int, default=8)
    asked = parser.parse_args()
    many, firsts = ([], []), ([], [])
    with (
        tempfile.TemporaryDirectory() as folder,
        kvd.serve(pool="2 GiB", settings={"device.threads": 1}) as server,
    ):
        make_model(folder)
        engine = Engine(folder, server, asked.codec)
        engine.run([some(300)], 8)
        print("load", os.getloadavg()[0])
        for turn in range(2 * asked.turns):
            # Turns are on, off, off, on: a machine that gets busier slows both.
            off = turn % 4 in (1, 2)
            engine.switch(not off)
            many[off].append(engine.run([some(256) for _ in range(8)], 64))
        for _ in range(asked.turns):
            prefix = some(PREFIX)
            engine.switch(True)
            engine.run([prefix + some(TAIL)], 1)
            engine.forget()
            before = engine.worker.counters.total()["loaded_tokens"]
            firsts[0].append(engine.run([prefix + some(TAIL)], 1))
            assert engine.worker.counters.total()["loaded_tokens"] == before + PREFIX
            engine.forget()
            engine.switch(False)
            firsts[1].append(engine.run([prefix + some(TAIL)], 1))
        print("load", os.getloadavg()[0])
        engine.llm.llm_engine.engine_core.shutdown()
    report("8 prompts of 256, 64 new tokens each, nothing hits", many)
    report(f"first token after a prefix of {PREFIX}", firsts)


if __name__ == "__main__":
    main()
