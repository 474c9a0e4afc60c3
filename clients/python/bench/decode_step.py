"""One decode step of a small trained model through transformers: stock and kvd in turns.

    python bench/decode_step.py --model tests/fixtures/kv-tiny-b

f32, one thread a side, 1,024 tokens of context, 64 new ones. Of the rounds: the least of each
percentile, and of the median of the engine's own processor time. On a busy machine p10 tells more
than p50: two processes wait for a core more often than one.
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
        model.register_forward_hook(
            lambda *_: self.ends.append((time.perf_counter(), time.thread_time()))
        )

    def take(self):
        """p10, p50 and p99 of the steps since the last call, without the prefill and its flush, and
        the median of processor time, in microseconds."""
        wall, own = np.diff(self.ends, axis=0)[1:].T * 1e6
        self.ends.clear()
        return [*np.percentile(wall, (10, 50, 99)), np.percentile(own, 50)]


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
                    rounds[way].append(steps.take())
                    if settings is not None:
                        cache.close()
            stock = np.min(rounds["stock sdpa"], axis=0)
            for way, measured in rounds.items():
                p10, p50, p99, own = np.min(measured, axis=0)
                print(
                    f"batch {batch}, {way:12}: p10 {p10:6.0f} us ({p10 / stock[0]:.2f} x stock),"
                    f" p50 {p50:6.0f} ({p50 / stock[1]:.2f}), p99 {p99:6.0f},"
                    f" processor {own:6.0f} ({own / stock[3]:.2f})"
                )
        client.close()


if __name__ == "__main__":
    main()
