"""One decode step of a small trained model through transformers: stock and kvd in turns.

    python bench/decode_step.py --model tests/fixtures/kv-tiny-b

f32, one thread a side, 1,024 tokens of context, 64 new ones; the best median of the rounds.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

import kvd
import kvd.transformers


class Steps:
    """Times of a model's forward passes."""

    def __init__(self, model):
        self.ends = []
        model.register_forward_hook(lambda *_: self.ends.append(time.perf_counter()))

    def take(self):
        """Microseconds of each step since the last call, without the prefill and its flush."""
        steps = np.diff(self.ends)[1:] * 1e6
        self.ends.clear()
        return steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.eval().generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    ids = np.fromfile(options.model / "eval_ids.u16", "<u2").astype(np.int64)
    ids, steps = torch.from_numpy(ids), Steps(model)
    ways = {
        "stock sdpa": None,
        "raw, tail": {"codec": "raw"},
        "kivi-4, tail": {"codec": "kivi-4"},
        "kivi-4, all": {"codec": "kivi-4", "mode": "all"},
    }
    with kvd.serve(pool="1 GiB", settings={"device.threads": 1}) as server:
        client = server.connect()
        print(f"{client.info().device}, torch {torch.__version__}, transformers", end=" ")
        print(f"{transformers.__version__}, load {os.getloadavg()[0]:.1f}")
        for batch in (1, 3):
            prompts = torch.stack([ids[n * 2000 : n * 2000 + 1024] for n in range(batch)])
            rounds = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way, settings in ways.items():
                    if settings is None:
                        model.set_attn_implementation("sdpa")
                        cache = transformers.DynamicCache(config=model.config)
                    else:
                        cache = kvd.transformers.KvdCache(model, client, **settings)
                    with torch.no_grad():
                        model.generate(
                            prompts,
                            attention_mask=torch.ones_like(prompts),
                            past_key_values=cache,
                            max_new_tokens=64,
                            do_sample=False,
                        )
                    taken = steps.take()
                    rounds[way].append((np.percentile(taken, 50), np.percentile(taken, 99)))
                    if settings is not None:
                        cache.close()
            stock = min(rounds["stock sdpa"])[0]
            for way, measured in rounds.items():
                p50, p99 = min(measured)
                print(
                    f"batch {batch}, {way:12}: p50 {p50:6.0f} us, p99 {p99:6.0f},"
                    f" {p50 / stock:.2f} x"
                )
        client.close()


if __name__ == "__main__":
    main()
