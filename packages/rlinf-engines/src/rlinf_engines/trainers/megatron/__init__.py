"""Trainer backend ``megatron``: tensor, pipeline and sequence parallel training with megatron-core."""
