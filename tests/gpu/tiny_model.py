"""Writes a Llama of 8 MB with random weights that SGLang can serve on one or two GPUs: ``tiny_model.py DIRECTORY``.

Run by the engine's own interpreter. Heads of 128 dimensions, because attention kernels are built for these.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.tiny_model import make_tokenizer


def main(directory: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=640, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
