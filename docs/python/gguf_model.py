"""Makes a model folder for `kvd eval --model` of a GGUF file.

    pip install gguf safetensors tokenizers
    python gguf_model.py model.gguf folder

Architectures llama, qwen2 and qwen3, dense, with byte-level BPE. The folder gets config.json,
model.safetensors and tokenizer.json; put eval.txt, a few hundred kB of text, beside them. Quantized
weights are dequantized to f16; f32 weights stay f32. Metadata that changes what the model computes
is carried over (rope base and scaling, head sizes, biases, norms) or refused by its key.
"""

import argparse
import json
import math
import pathlib
import struct
import sys

PACKAGES = "gguf safetensors tokenizers"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Divisors of the rotary frequencies, which llama.cpp keeps as a tensor (Llama 3.1 and later).
ROPE_DIVISORS = "rope_freqs.weight"
# Metadata of an architecture that is read below, or that says nothing about the computation.
READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
# Metadata with one value that changes nothing.
NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "expert_count": 0,
    "expert_used_count": 0,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_beta_fast": 32,
    "rope.scaling.yarn_beta_slow": 1,
}
NORMAL_TOKEN, CONTROL_TOKEN, USER_TOKEN = 1, 3, 4
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
F16_MAX = 65504.0


class Refused(Exception):
    """A file that this script, or kvd, does not compute; the message names the key."""


class Metadata:
    """The key-value pairs of a GGUF file, those of its architecture without their prefix."""

    def __init__(self, fields):
        self.fields = fields
        self.architecture = self.general("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise Refused(f"general.architecture: {self.architecture!r} is not supported: {known}")
        self.prefix = f"{self.architecture}."
        if self.general("split.count", 1) > 1:
            raise Refused("split.count: the model is in several files; merge them into one first")

    def general(self, key, default=None):
        value = self.fields.get(key, default)
        if value is None:
            raise Refused(f"{key}: the file has no such key")
        return value

    def has(self, key):
        return self.prefix + key in self.fields

    def get(self, key, default=None):
        return self.general(self.prefix + key, default)

    def count(self, key, default=None):
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"{self.prefix}{key}: expected a number from 1 on, found {value!r}")
        return value

    def check(self):
        """Refuses every key of the architecture that is not known to change nothing."""
        for name, value in self.fields.items():
            key = name.removeprefix(self.prefix)
            if isinstance(value, float) and not math.isfinite(value):
                raise Refused(f"{name}: expected a finite number, found {value}")
            if key == name or key in READ:
                continue
            if key not in NEUTRAL or value != NEUTRAL[key]:
                raise Refused(f"{name}: {value!r} is not supported")


def rotate_half(rows, heads):
    """Rows of a projection or bias, from neighbouring pairs to pairs half a head apart."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def folder_name(name):
    """The name that a tensor has in a model folder."""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in TOP:
            return f"{TOP[stem]}.{kind}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block == "blk" and layer.isdigit() and part in LAYER:
            return f"model.layers.{layer}.{LAYER[part]}.{kind}"
    raise Refused(f"tensor {name}: not known; it may change what the model computes")


def narrowed(np, rows, source):
    """f16 for what was quantized or 16 bits wide, unless a value does not fit."""
    wide = source == "F32" or np.abs(rows).max(initial=0) > F16_MAX
    return np.ascontiguousarray(rows, np.float32 if wide else np.float16)


def weights(np, dequantize, tensors, metadata, heads, kv_heads):
    made = {}
    for tensor in tensors:
        if tensor.name == ROPE_DIVISORS:
            continue
        name = folder_name(tensor.name)
        try:
            rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise Refused(f"tensor {tensor.name}: weights of type {kind} are not read") from None
        if not np.isfinite(rows).all():
            raise Refused(f"tensor {tensor.name}: holds NaN or infinity; is the file damaged?")
        if metadata.architecture == "llama" and ".self_attn.q_proj." in name:
            rows = rotate_half(rows, heads)
        if metadata.architecture == "llama" and ".self_attn.k_proj." in name:
            rows = rotate_half(rows, kv_heads)
        made[name] = narrowed(np, rows, tensor.tensor_type.name)
    return made


def rope(metadata, divisors):
    """The scaling of the rotary embedding as config.json has it, or None."""
    context = metadata.count("context_length")
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    if divisors is not None:
        if kind != "none" or factor != 1.0:
            raise Refused(f"{metadata.prefix}rope.scaling.type: {kind!r} beside {ROPE_DIVISORS}")
        # Any divisors of the frequencies, the same for texts of every length.
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if kind == "none" and not metadata.has("rope.scaling.type") and factor != 1.0:
        kind = "linear"
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.count("rope.scaling.original_context_length", context)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise Refused(f"{metadata.prefix}rope.scaling.type: {kind!r} is not supported")


def config(metadata, tensors, divisors):
    heads = metadata.count("attention.head_count")
    hidden = metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise Refused(f"{metadata.prefix}{key}: {metadata.get(key)}, but heads have {head_dim}")
    made = {
        "model_type": metadata.architecture,
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": metadata.count("context_length"),
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "rope_scaling": rope(metadata, divisors),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": metadata.fields.get("tokenizer.ggml.bos_token_id"),
    }
    biased = {name.split(".")[-2] for name in tensors if name.endswith(".bias")}
    if metadata.architecture != "qwen2":
        made["attention_bias"] = "q_proj" in biased
        if metadata.architecture == "llama":
            made["mlp_bias"] = "gate_proj" in biased
    return made


def splitter(kind, tools):
    """How text is cut into words before BPE, by `tokenizer.ggml.pre`."""
    pre = tools.pre_tokenizers
    if kind in ("gpt-2", "default"):
        return pre.ByteLevel(add_prefix_space=False)
    if kind in ("smollm", "starcoder", "refact", "command-r"):
        return pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
    digits = {"llama-bpe": "{1,3}", "llama3": "{1,3}", "llama-v3": "{1,3}", "qwen2": ""}
    if kind not in digits:
        raise Refused(f"tokenizer.ggml.pre: {kind!r} is not supported")
    pattern = tools.Regex(WORDS + r"\p{N}" + digits[kind] + REST)
    return pre.Sequence(
        [
            pre.Split(pattern, behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer(metadata, tools):
    model = metadata.general("tokenizer.ggml.model")
    if model != "gpt2":
        raise Refused(f"tokenizer.ggml.model: {model!r} is not supported; gpt2, byte-level BPE, is")
    tokens = metadata.general("tokenizer.ggml.tokens")
    kinds = metadata.fields.get("tokenizer.ggml.token_type", [NORMAL_TOKEN] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in metadata.general("tokenizer.ggml.merges")]
    pre = metadata.general("tokenizer.ggml.pre")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3")
    odd = [" ".join(merge) for merge in merges if len(merge) != 2]
    if odd:
        raise Refused(f"tokenizer.ggml.merges: {odd[0]!r} is no pair of tokens")
    if len(vocabulary) != len(tokens):
        raise Refused("tokenizer.ggml.tokens: a token is there twice")
    parts = (part for merge in merges for part in (*merge, "".join(merge)))
    unknown = [part for part in parts if part not in vocabulary]
    if unknown:
        raise Refused(f"tokenizer.ggml.merges: {unknown[0]!r} is not in tokenizer.ggml.tokens")
    made = tools.Tokenizer(
        tools.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)
    )
    if pre == "qwen2":
        made.normalizer = tools.normalizers.NFC()
    made.pre_tokenizer = splitter(pre, tools)
    made.decoder = tools.decoders.ByteLevel()
    for kind, add in ((CONTROL_TOKEN, made.add_special_tokens), (USER_TOKEN, made.add_tokens)):
        special = kind == CONTROL_TOKEN
        chosen = [token for token, found in zip(tokens, kinds) if found == kind]
        add([tools.AddedToken(token, special=special, normalized=False) for token in chosen])
    return made


def convert(source, folder):
    import gguf
    import numpy as np
    import tokenizers
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise Refused("the file is big-endian; convert it to little-endian first")
    metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
    metadata.check()
    heads = metadata.count("attention.head_count")
    kv_heads = metadata.count("attention.head_count_kv", heads)
    tensors = weights(np, gguf.dequantize, reader.tensors, metadata, heads, kv_heads)
    if "model.embed_tokens.weight" not in tensors:
        raise Refused("tensor token_embd.weight: the file has no such tensor")
    divisors = [t for t in reader.tensors if t.name == ROPE_DIVISORS]
    divisors = [float(x) for x in divisors[0].data.reshape(-1)] if divisors else None
    if divisors and not all(math.isfinite(x) and x > 0 for x in divisors):
        raise Refused(f"tensor {ROPE_DIVISORS}: divisors must be finite and above 0")
    made = config(metadata, tensors, divisors)
    words = tokenizer(metadata, tokenizers)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(made, indent=2) + "\n")
    words.save(str(folder / "tokenizer.json"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="model.gguf", help="the GGUF file")
    parser.add_argument("folder", help="the folder to write; made where it does not exist")
    arguments = parser.parse_args()
    if not pathlib.Path(arguments.source).is_file():
        sys.exit(f"gguf_model.py: {arguments.source} is no file")
    try:
        convert(arguments.source, arguments.folder)
    except ModuleNotFoundError as missing:
        sys.exit(f"gguf_model.py: no package {missing.name}; pip install {PACKAGES}")
    except Refused as reason:
        sys.exit(f"gguf_model.py: {reason}")
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        sys.exit(f"gguf_model.py: {arguments.source} cannot be read: {error}")


if __name__ == "__main__":
    main()
