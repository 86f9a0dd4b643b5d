"""Chat on every checkpoint: one process per machine with the base models in memory and the adapters on top.

service.py   the HTTP door: one request in, one completion or one stream of chunks out
prompts.py   the client's request as the engine's task: token ids, sampling, and what is refused by name
engine.py    continuous batching: admit, prefill a little, decode one token for everybody, tell
forward.py   the network over rows of key-value memory; lora.py adds any mix of adapters to it
choices.py   the tokens of one choice as what a client reads; texts.py and tools.py know characters and calls
"""
