"""Write a Llama of a published shape with random weights, and rows of random text to train it on.

    python scripts/make_random_model.py 8b OUT --tokenizer FOLDER [--rows 64 --words 2600]

For measuring speed and memory without downloading a model: nothing useful can be learnt from either. The
tokenizer of FOLDER (any with a chat template and fewer than 128,256 tokens) is copied; every row is longer
than `--words` tokens, so with `overlong: truncate` all sequences have exactly `max_seq_len` tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

# hidden, intermediate, layers, heads, key-value heads: the config.json that Meta published for each size
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}  # fmt: skip


def main() -> None:
    """Write the model folder and `random.jsonl` in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--words", type=int, default=2600)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    config = LlamaConfig(
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **SHAPES[options.shape],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(options.out, max_shard_size="4GB")
    tokenizer.save_pretrained(options.out)

    draw = random.Random(0)
    words = ["river", "hill", "stone", "light", "rain", "seven", "north", "paper", "green", "window"]
    with (options.out / "random.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(options.rows):
            answer = " ".join(draw.choices(words, k=options.words))
            turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    main()
