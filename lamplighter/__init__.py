"""Replaces the LLM server on a GPU node over SSH and never leaves the node dark."""

__version__ = "0.1.0"
