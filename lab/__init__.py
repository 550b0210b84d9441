"""A GPU node in a box: an SSH server, an nvidia-smi stand-in with a ledger of GPU memory, an SGLang-shaped server.

Nothing here needs a GPU, root or the network; what the stand-ins answer is what an H200 node answered when recorded.
"""
