"""Sizes that are compiled in; importable without JAX."""

PREFILL_CHUNK = 128  # tokens of a row in one prefill step, unless told otherwise
MAX_LOGPROBS = 20  # likeliest tokens reported a step
MIN_TEMPERATURE = 1e-5  # below it a request is greedy, as in vLLM: logits over less could overflow
NOT_FINITE = -2  # stands for a token whose logits were NaN or infinite
MAX_STOP_IDS = 32  # ids that may end one request, eos included
