"""Runs the example on the trained fixture: with `raw` its tokens are those of transformers.

    KVD_BINARY=… python examples/candle/compare.py TARGET/debug/kvd-candle
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import torch
import transformers

import kvd

FIXTURE = pathlib.Path(__file__).parents[2] / "tests/fixtures/kv-tiny-b"
NEW_TOKENS = 64


def main():
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURE, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = np.fromfile(FIXTURE / "eval_ids.u16", "<u2").astype(int)
    with kvd.serve(pool="256 MiB", settings={"device.threads": 1}) as server:

        def run(codec, chunk, prompt):
            command = [sys.argv[1], FIXTURE, server.unix, codec, str(NEW_TOKENS), str(chunk)]
            done = subprocess.run(
                command, input=json.dumps(prompt), text=True, stdout=subprocess.PIPE, check=True
            )
            return json.loads(done.stdout)

        for start, count, chunk in [(0, 100, 100), (5000, 700, 64), (9000, 1500, 256)]:
            prompt = ids[start : start + count].tolist()
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
            expected = whole[0, count:].tolist()
            assert run("raw", chunk, prompt) == expected, f"{count} tokens in steps of {chunk}"
            lossy = run("kivi-2", chunk, prompt)
            same = next((at for at in range(NEW_TOKENS) if lossy[at] != expected[at]), NEW_TOKENS)
            print(f"{count} tokens in steps of {chunk}: raw equal, kivi-2 for the first {same}")
        with server.connect() as client:
            assert not client.sequences(), "a run has left sequences"


if __name__ == "__main__":
    main()
