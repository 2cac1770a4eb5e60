"""Rollouts by SGLang servers, over HTTP. Nothing here imports sglang: a server lives in an environment of its own."""
