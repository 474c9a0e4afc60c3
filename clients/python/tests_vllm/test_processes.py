"""vLLM in its default form, with processes of its own, and two of them on one daemon."""

import json
import os
import subprocess
import sys
import textwrap

from conftest import SHARED, prompts

import kvd.vllm

SCRIPT = textwrap.dedent(
    """
    import json, sys

    def main():
        asked = json.load(sys.stdin)
        import vllm
        llm = vllm.LLM(
            model=asked["model"], kv_transfer_config=asked["transfer"], skip_tokenizer_init=True,
            enforce_eager=True, dtype="float32", max_model_len=2048, block_size=asked["block"],
            seed=0, max_num_batched_tokens=256, disable_log_stats=False, **asked["engine"],
        )
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": one} for one in asked["prompts"]]
        answers = llm.generate(inputs, sampling, use_tqdm=False)
        metrics = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:kvd_")}
        print("RESULT " + json.dumps({
            "tokens": [list(one.outputs[0].token_ids) for one in answers],
            "cached": [one.num_cached_tokens for one in answers],
            "metrics": metrics,
        }))

    if __name__ == "__main__":
        main()
    """
)


def run_vllm(tmp_path, folder, server, block, asked, variables=None, engine=None):
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= variables or {}
    question = {
        "model": folder,
        "transfer": kvd.vllm.transfer_settings(server.region),
        "block": block,
        "engine": engine or {},
        "prompts": asked,
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(question),
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_two_processes_share_prefixes(tmp_path, model_folder, server, stock):
    first = run_vllm(tmp_path, model_folder, server, 32, prompts())
    assert first["tokens"] == stock["cold"]
    assert first["metrics"]["vllm:kvd_stored_tokens"] >= 2500
    assert first["metrics"]["vllm:kvd_loaded_tokens"] in (0, SHARED)
    second = run_vllm(tmp_path, model_folder, server, 32, prompts())
    assert second["tokens"] == stock["cold"]
    assert second["metrics"]["vllm:kvd_loaded_tokens"] >= 2500
    assert second["metrics"]["vllm:kvd_load_failures"] == 0
    # vLLM tells its callers: whole pages, and never the last token.
    assert second["cached"][:4] == [64, 320, 576, 1472]


def test_attention_by_kvd_in_processes_that_share_prefixes(tmp_path, model_folder, server, stock):
    """The plug-in's entry point is what vLLM's processes have; the package must be installed."""
    attends = {
        "variables": {"KVD_VLLM_ATTENTION": "1"},
        "engine": {"enable_prefix_caching": False, "num_gpu_blocks_override": 128},
    }
    first = run_vllm(tmp_path, model_folder, server, 32, prompts(), **attends)
    assert first["tokens"] == stock["cold"]
    assert first["metrics"]["vllm:kvd_stored_tokens"] >= 3000
    second = run_vllm(tmp_path, model_folder, server, 32, prompts(), **attends)
    assert second["tokens"] == stock["cold"]
    assert second["metrics"]["vllm:kvd_loaded_tokens"] >= 2500
    assert second["metrics"]["vllm:kvd_attend_failures"] == 0
    assert second["cached"][:4] == [64, 320, 576, 1472]
