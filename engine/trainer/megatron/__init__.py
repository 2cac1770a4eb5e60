"""The trainer backend on megatron-core: tensor, pipeline, expert and data parallel, Hugging Face weights in and out."""
