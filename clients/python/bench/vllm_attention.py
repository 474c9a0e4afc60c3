"""kvd's attention in vLLM: what a codec changes, and what a step costs beside vLLM alone. And what
the connector costs where nothing hits.

    KVD_BINARY=… python bench/vllm_attention.py error tests/fixtures/kv-tiny-b
    KVD_BINARY=… python bench/vllm_attention.py cost [--turns 8]
    KVD_BINARY=… python bench/vllm_attention.py misses [--turns 8]

`error`: teacher-forced KL to vLLM alone over a passage of 1,024 tokens in steps of 8, all in f32.
`cost`, `misses`: a random Llama in bf16 (that of vllm_prefix.py); vLLM alone and the others are
processes that run by turns, one thread each and one of the daemon. Lower quartiles.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
)

import numpy as np

import kvd
import kvd.vllm

CODECS = ["raw", "fp8", "kivi-4", "kivi-2"]
PREFIX = 1024


# Runs by name: prompts, tokens of each and new ones, and the run that is taken off.
COSTS = {
    "first token": ([1, PREFIX, 1], None),
    "a step of 1": ([1, PREFIX, 65], [1, PREFIX, 1]),
    "a step of 8": ([8, PREFIX, 65], [8, PREFIX, 1]),
}
MISSES = {"8 x (256 + 64) tokens": ([8, 256, 64], None)}
ALONE, CONNECTOR = "vLLM alone", "connector"


def make_engine(region, mode, **settings):
    """A vLLM: alone, with the connector and raw, or with kvd's attention and a codec."""
    if mode != ALONE:
        codec = "raw" if mode == CONNECTOR else mode
        settings["kv_transfer_config"] = kvd.vllm.transfer_config(region, codec=codec)
    if mode not in (ALONE, CONNECTOR):
        os.environ["KVD_VLLM_ATTENTION"] = "1"
        settings["num_gpu_blocks_override"] = 512
    import vllm

    return vllm.LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=mode == CONNECTOR,
        **settings,
    )


def read_probabilities(asked):
    """Log probabilities of a passage, token by token."""
    import vllm

    engine = make_engine(
        asked["region"],
        asked["mode"],
        model=asked["model"],
        dtype="float32",
        block_size=32,
        max_num_batched_tokens=8,
        max_num_seqs=1,
        max_logprobs=-1,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False
    )
    answer = engine.generate({"prompt_token_ids": asked["tokens"]}, sampling, use_tqdm=False)
    rows = [
        [place[token].logprob for token in range(len(place))]
        for place in answer[0].prompt_logprobs[1:]
    ]
    np.save(asked["out"], np.array(rows, np.float64))


def serve_turns(asked):
    """Runs what it is told by lines: numbers of prompts, of their tokens and of new ones."""
    import vllm

    engine = make_engine(
        asked["region"], asked["mode"], model=asked["model"], dtype="bfloat16", block_size=64
    )
    draw = np.random.default_rng(0)
    print("ready", flush=True)
    for line in sys.stdin:
        count, length, tokens = json.loads(line)
        prompts = [
            {"prompt_token_ids": draw.integers(3, 4096, length).tolist()} for _ in range(count)
        ]
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began, used = time.perf_counter(), time.process_time()
        engine.generate(prompts, sampling, use_tqdm=False)
        took = (time.perf_counter() - began, time.process_time() - used)
        print("took", *took, flush=True)


def start(role, **asked):
    return subprocess.Popen(
        [sys.executable, __file__, role, json.dumps(asked)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process, sign):
    for line in process.stdout:
        if line.startswith(sign):
            return line
    raise SystemExit("a process has ended early")


def compare_errors(server, fixture, work):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(os.path.join(fixture, name), work)
    tokens = np.fromfile(os.path.join(fixture, "eval_ids.u16"), "<u2")[:PREFIX].tolist()
    found = {}
    for codec in [ALONE, *CODECS]:
        out = os.path.join(work, "rows.npy")
        asked = {"region": server.region, "mode": codec, "model": work, "tokens": tokens}
        assert start("read", out=out, **asked).wait() == 0
        found[codec] = np.load(out)
    own = found[ALONE][128:]
    for codec in CODECS:
        other = found[codec][128:]
        kl = (np.exp(own) * (own - other)).sum(1).mean()
        same = (own.argmax(1) == other.argmax(1)).mean()
        print(f"{codec}: KL {kl:.1e} nats, top-1 {100 * same:.1f} %")


def time_turns(server, work, turns, modes, runs):
    from vllm_prefix import make_model

    make_model(work)
    engines = [start("turns", region=server.region, mode=one, model=work) for one in modes]
    for engine in engines:
        wait_for(engine, "ready")

    def daemon_seconds():
        with open(f"/proc/{server.pid}/stat") as stat:
            fields = stat.read().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def time_run(engine, run):
        """Seconds on the wall, of the engine's processor time, and of the daemon's."""
        used = daemon_seconds()
        print(json.dumps(run), file=engine.stdin, flush=True)
        wall, own = map(float, wait_for(engine, "took").split()[1:])
        return np.array([wall, own, daemon_seconds() - used])

    seconds = {(mode, name): [] for mode in modes for name in runs}
    print("load", os.getloadavg()[0])
    for turn in range(turns + 1):
        for name, (run, without) in runs.items():
            # Every other turn the other way round.
            for mode, engine in list(zip(modes, engines, strict=True))[:: 1 - turn % 2 * 2]:
                value = time_run(engine, run)
                if without:
                    # A step is what further tokens take.
                    value = (value - time_run(engine, without)) / (run[2] - without[2])
                if turn:
                    seconds[mode, name].append(value)
    print("load", os.getloadavg()[0])
    for name in runs:
        found = {m: 1e3 * np.quantile(seconds[m, name], 0.25, axis=0) for m in modes}
        for at, kind in enumerate(("wall", "the engine's processor time", "the daemon's")):
            shown = []
            for mode in modes:
                ratio = found[modes[0]][at] / found[mode][at] if found[mode][at] else 0
                shown.append(f"{mode} {found[mode][at]:.1f} ms ({ratio:.3f})")
            print(f"{name}, {kind}: {', '.join(shown)}")
    for engine in engines:
        engine.stdin.close()
        engine.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["error", "cost", "misses", "read", "turns"])
    parser.add_argument("given", nargs="?")
    parser.add_argument("--turns", type=int, default=8)
    asked = parser.parse_args()
    if asked.what == "read":
        return read_probabilities(json.loads(asked.given))
    if asked.what == "turns":
        return serve_turns(json.loads(asked.given))
    settings = {"device.threads": 1}
    with (
        tempfile.TemporaryDirectory() as work,
        kvd.serve(pool="2 GiB", settings=settings) as server,
    ):
        if asked.what == "error":
            compare_errors(server, asked.given, work)
        elif asked.what == "cost":
            time_turns(server, work, asked.turns, [ALONE, "raw", "kivi-4"], COSTS)
        else:
            time_turns(server, work, asked.turns, [ALONE, CONNECTOR], MISSES)
    return None


if __name__ == "__main__":
    main()
