"""Makes a model folder for `kvd eval --model` of a Llama-style GGUF file.

    pip install gguf safetensors tokenizers
    python gguf_model.py model.gguf folder

Quantized weights are dequantized to f16. The folder gets config.json, model.safetensors and
tokenizer.json (byte-level BPE only); put eval.txt, a few hundred kB of text, beside them.
"""

import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL_TOKEN = 3


def rotate_half(rows, heads):
    """Rows of a projection, from pairs that are neighbours to pairs half a head apart."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def weights(reader, heads, kv_heads):
    for tensor in reader.tensors:
        rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if name in TOP:
            yield f"{TOP[name]}.weight", rows.astype(np.float16)
            continue
        _, layer, part = name.split(".")
        if part in ("attn_q", "attn_k"):
            rows = rotate_half(rows, heads if part == "attn_q" else kv_heads)
        yield f"model.layers.{layer}.{LAYER[part]}.weight", rows.astype(np.float16)


def tokenizer(field):
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds) if kind == CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(t, special=True) for t in control])
    return made


def main(source, folder):
    reader = GGUFReader(source)
    field = lambda name: reader.fields[name].contents()
    heads, kv_heads = (field(f"llama.attention.head_count{kv}") for kv in ("", "_kv"))
    tensors = dict(weights(reader, heads, kv_heads))
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": field("llama.rope.freq_base"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer(field).save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
