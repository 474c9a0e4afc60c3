"""Tests of gguf_model.py: model folders of tests/fixtures/models go to GGUF files and back.

    pip install gguf safetensors tokenizers
    python docs/python/test_gguf_model.py

With KVD, the path of the program, `kvd eval` reads the folders too, and its perplexity must be that
of the folder that the GGUF file was made of.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import gguf
import numpy as np
import safetensors
from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent
FIXTURES = HERE.parents[1] / "tests/fixtures/models"
SCRIPT = HERE / "gguf_model.py"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# As many tokens as the fixtures have.
TOKENS = ["<s>", "Ġ", *"abcdefghijklmnopqrstuvwxyz0123456789.,:;-+*/", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]
TEXT = "a cab and a bad tab; 1, 2, 3: abc. " * 40


def read(folder):
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.deserialize((folder / "model.safetensors").read_bytes())
    return config, {name: numbers(tensor) for name, tensor in tensors}


def numbers(tensor):
    """A stored tensor in f32; NumPy has no bfloat16, whose bits are the upper half of an f32's."""
    if tensor["dtype"] == "BF16":
        halves = np.frombuffer(tensor["data"], dtype="<u2").astype(np.uint32)
        flat = (halves << 16).view(np.float32)
    else:
        stored = {"F32": "<f4", "F16": "<f2"}[tensor["dtype"]]
        flat = np.frombuffer(tensor["data"], dtype=stored).astype(np.float32)
    return flat.reshape(tensor["shape"])


def neighbours(rows, heads):
    """Pairs half a head apart become neighbours, as llama.cpp rotates them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write(path, fixture, architecture=None, change=None, divisors=None):
    """A GGUF file of a fixture; `change` adds to its metadata."""
    config, weights = read(FIXTURES / fixture)
    architecture = architecture or config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    if change:
        change(writer)
    for name, rows in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            rows = neighbours(rows, heads)
        if architecture == "llama" and ".k_proj." in name:
            rows = neighbours(rows, kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(rows))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(config):
    """What llama.cpp's converter writes for the scaling of Llama 3.1."""
    scaling, dim = config["rope_parameters"], config["head_dim"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for i in range(dim // 2):
        turns = original * scaling["rope_theta"] ** (-2 * i / dim) / (2 * np.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return divisors


def perplexity(folder):
    (folder / "eval.txt").write_text(TEXT)
    command = [os.environ["KVD"], "eval", "--model", folder, "--codec", "raw", "--json", "-"]
    command += ["--passages", "1", "--tokens", "48"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["blocks"][0]["without_kvd"]["perplexity"]


class GgufModel(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def run_script(self, *arguments, environment=None):
        command = [sys.executable, SCRIPT, *arguments]
        env = {**os.environ, **(environment or {})}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    def convert(self, fixture, **options):
        file = self.path / "model.gguf"
        write(file, fixture, **options)
        done = self.run_script(file, self.path / "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.path / "out"

    def refused(self, fixture, key, **options):
        file = self.path / "model.gguf"
        write(file, fixture, **options)
        done = self.run_script(file, self.path / "out")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(key, done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def same(self, fixture, **options):
        """The folder of a fixture's GGUF file has its weights, keys and perplexity."""
        out = self.convert(fixture, **options)
        (config, weights), (made, found) = read(FIXTURES / fixture), read(out)
        self.assertEqual(weights.keys(), found.keys())
        for name, rows in weights.items():
            np.testing.assert_array_equal(rows, found[name], name)
        for key in ("model_type", "hidden_size", "num_key_value_heads", "head_dim", "vocab_size",
                    "intermediate_size", "max_position_embeddings", "tie_word_embeddings"):
            self.assertEqual(config[key], made[key], key)
        for key in ("attention_bias", "mlp_bias"):
            self.assertEqual(bool(config.get(key)), bool(made.get(key)), key)
        self.assertAlmostEqual(config["rms_norm_eps"], made["rms_norm_eps"])
        self.assertEqual(config["rope_parameters"]["rope_theta"], made["rope_theta"])
        if "KVD" in os.environ:
            original = self.path / "original"
            original.mkdir()
            (original / "model.safetensors").write_bytes(
                (FIXTURES / fixture / "model.safetensors").read_bytes()
            )
            (original / "config.json").write_text(json.dumps(config | {"bos_token_id": 0}))
            (original / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes())
            ratio = perplexity(out) / perplexity(original)
            self.assertAlmostEqual(ratio, 1.0, delta=1e-5)
        return made

    def test_llama_and_its_biases(self):
        self.assertIsNone(self.same("llama")["rope_scaling"])

    def test_biases(self):
        self.same("llama-biases")

    def test_tied(self):
        self.same("llama-tied")

    def test_qwen2(self):
        self.same("qwen2")

    def test_qwen3(self):
        self.same("qwen3")

    def test_linear_scaling(self):
        def change(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)

        made = self.same("llama-linear", change=change)
        self.assertEqual(made["rope_scaling"], {"rope_type": "linear", "factor": 4.0})

    def test_yarn_scaling(self):
        def change(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(16)

        self.assertEqual(self.same("llama-yarn", change=change)["rope_scaling"]["factor"], 4.0)

    def test_llama3_scaling_is_a_tensor(self):
        config, _ = read(FIXTURES / "llama-llama3")
        made = self.same("llama-llama3", divisors=llama3_divisors(config))
        self.assertEqual(len(made["rope_scaling"]["short_factor"]), config["head_dim"] // 2)

    def test_what_is_not_computed_is_refused_by_its_key(self):
        self.refused("llama", "general.architecture", architecture="gemma2")
        for key, value in (
            ("llama.attention.sliding_window", 4096),
            ("llama.expert_count", 8),
            ("llama.a_key_of_tomorrow", 1),
            ("llama.rope.dimension_count_swa", 4),
        ):
            self.refused("llama", key, change=lambda w, k=key, v=value: w.add_uint32(k, v))
        self.refused(
            "llama",
            "final_logit_softcapping",
            change=lambda w: w.add_float32("llama.final_logit_softcapping", 30.0),
        )

        def longrope(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

        self.refused("llama", "llama.rope.scaling.type", change=longrope)

    def test_broken_values_are_refused_by_their_key(self):
        for key, value in (
            ("llama.rope.scaling.factor", float("nan")),
            ("llama.rope.scale_linear", float("inf")),
        ):
            self.refused("llama", key, change=lambda w, k=key, v=value: w.add_float32(k, v))
        for merges in (["c a", "b"], ["c zz"]):
            def change(writer, merges=merges):
                writer.kv_data[0]["tokenizer.ggml.merges"].value = merges

            self.refused("llama", "tokenizer.ggml.merges", change=change)
        self.refused("llama", "rope_freqs.weight", divisors=[0.0] * 4)
        for rows, said in ((np.ones((4, 4), np.int32), "I32"), (np.full(4, np.nan, "f4"), "NaN")):
            def extra(writer, rows=rows):
                writer.add_tensor("blk.0.attn_q.bias", rows)

            self.refused("llama", said, change=extra)

    def test_neutral_values_are_read(self):
        def change(writer):
            writer.add_uint32("llama.attention.sliding_window", 0)
            writer.add_float32("llama.logit_scale", 1.0)

        self.convert("llama", change=change)

    def test_the_tokenizer_reads_text(self):
        words = Tokenizer.from_file(str(self.convert("llama") / "tokenizer.json"))
        found = words.encode("cab ab 12<s>").tokens
        self.assertEqual(found, ["c", "ab", "Ġ", "ab", "Ġ", "1", "2", "<s>"])

    def test_help_and_missing_files_and_packages(self):
        self.assertEqual(self.run_script("--help").returncode, 0)
        done = self.run_script(self.path / "none.gguf", self.path / "out")
        self.assertIn("is no file", done.stderr)
        file = self.path / "cut.gguf"
        file.write_bytes(b"GGUG")
        done = self.run_script(file, self.path / "out")
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotEqual(done.returncode, 0)
        # A package of this name that cannot be found, before the installed one.
        block = "raise ModuleNotFoundError(\"No module named 'gguf'\", name='gguf')\n"
        (self.path / "gguf.py").write_text(block)
        done = self.run_script(file, self.path / "out", environment={"PYTHONPATH": str(self.path)})
        self.assertIn("no package gguf; pip install", done.stderr)


if __name__ == "__main__":
    unittest.main()
