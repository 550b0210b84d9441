"""Writes a Llama with random weights that SGLang can serve on one or two GPUs: ``tiny_model.py DIRECTORY [large]``.

It has 8 MB; a large one 8.8 GB, whose weights are made on the GPU.
Run by the engine's own interpreter. Heads of 128 dimensions, because attention kernels are built for these.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.tiny_model import make_tokenizer

TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 18, "num_attention_heads": 32}


def main(directory: Path, sizes: dict[str, int], device: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(7)
    config = LlamaConfig(
        **sizes, vocab_size=640, num_key_value_heads=sizes["num_attention_heads"], head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, dtype="bfloat16",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to("cpu").save_pretrained(directory)


if __name__ == "__main__":
    is_large = sys.argv[2:] == ["large"]
    main(Path(sys.argv[1]), LARGE if is_large else TINY, "cuda" if is_large else "cpu")
