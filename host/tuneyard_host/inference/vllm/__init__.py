"""A vLLM server behind our door: it computes, we resolve names, count, book, and speak one language.

server.py    one base model that a vLLM server answers for, with the interface of the embedded server
adapters.py  checkpoints loaded into it when first named, and unloaded when the room is needed or they are idle
calls.py     HTTP to it
wire.py      its requests, answers and errors, translated; no network
"""
