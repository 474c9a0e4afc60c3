"""What the connector costs where nothing hits, and what a prefix that vLLM dropped costs.

    KVD_BINARY=… python bench/vllm_prefix.py [--codec kivi-4] [--rounds 3]

A random Llama in bf16 (12 layers, 768 wide, 4 KV heads of 64), in vLLM's own process each, with one
thread; runs without and with the connector take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PREFIX, TAIL = 1024, 32
ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def make_model(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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


def measure(folder, transfer, seed):
    """One engine: throughput of prompts that share nothing, and times to a first token."""
    import random

    import vllm

    llm = vllm.LLM(
        model=folder,
        kv_transfer_config=transfer,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2048,
        block_size=64,
        max_num_batched_tokens=1024,
    )
    draw = random.Random(seed)

    def run(asked, tokens):
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began, used = time.perf_counter(), time.process_time()
        llm.generate([{"prompt_token_ids": one} for one in asked], sampling, use_tqdm=False)
        return time.perf_counter() - began, time.process_time() - used

    def some(count):
        return [draw.randrange(3, 4096) for _ in range(count)]

    run([some(300)], 8)
    many = [run([some(256) for _ in range(8)], 64) for _ in range(4)]
    firsts = []
    for _ in range(5):
        prefix = some(PREFIX)
        run([prefix + some(TAIL)], 1)
        time.sleep(0.3)  # what is stored beside the engine is there
        assert llm.reset_prefix_cache()
        firsts.append(run([prefix + some(TAIL)], 1))
        assert llm.reset_prefix_cache()
    loaded = 0
    if transfer:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        loaded = get_kv_transfer_group().counters.total()["loaded_tokens"]
        assert loaded == 5 * PREFIX, loaded
    print("RESULT " + json.dumps({"many": many, "firsts": firsts}))


def run_engine(folder, transfer, seed):
    question = json.dumps({"folder": folder, "transfer": transfer, "seed": seed})
    done = subprocess.run(
        [sys.executable, __file__, "--engine", question],
        env={**os.environ, **ENGINE},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stderr[-3000:])
    return json.loads(lines[0].removeprefix("RESULT "))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine:
        measure(**json.loads(asked.engine))
        return
    import kvd
    import kvd.vllm

    with (
        tempfile.TemporaryDirectory() as folder,
        kvd.serve(pool="2 GiB", settings={"device.threads": 1}) as server,
    ):
        make_model(folder)
        transfer = kvd.vllm.transfer_settings(server.region, codec=asked.codec)
        plain, with_kvd = [], []
        for at in range(asked.rounds):
            plain.append(run_engine(folder, None, 2 * at))
            with_kvd.append(run_engine(folder, transfer, 2 * at + 1))
            print(f"round {at}, load {os.getloadavg()[0]:.1f}", flush=True)
            for kind, name in enumerate(("wall", "engine's processor time")):
                for part, label in (("many", "nothing hits"), ("firsts", "first token")):
                    report(f"{label}, {name}", part, kind, (plain, with_kvd))


def report(label, part, kind, runs):
    """Medians of all that was measured so far, and their ratio."""
    medians = [
        statistics.median(times[kind] for one in side for times in one[part]) for side in runs
    ]
    without, with_kvd = (f"{one * 1e3:.1f} ms" for one in medians)
    ratio = medians[1] / medians[0]
    print(f"  {label}: without {without}, with {with_kvd}, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
