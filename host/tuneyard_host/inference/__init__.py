"""Chat on every checkpoint: one process per machine with the base models in memory and the adapters on top.

service.py   the HTTP door; server.py  one base model behind it; meter.py  who may ask how much at once
vllm/        a base model that a vLLM server answers for instead, behind the same door
prompts.py   the client's request as the engine's task; options.py  what is refused; grammars.py  answers of a form
engine.py    continuous batching: admit, read a little, write one token for everybody, tell
sequences.py one choice on its way, and the queue; rows.py  key-value memory, and what can be shared in it
forward.py   the network, on the weights of weights.py; lora.py  any mix of adapters in it; sampling.py  the draw
adapters.py  adapters fetched from the bucket when first named
choices.py   the tokens of a choice as a client reads them; texts.py, tools.py, answers.py  characters, calls, shapes
"""
