"""``tuneyard demo``: a tour through the public HTTP API and nothing else, as any client could take it.

story.py    the tour: RL until the model says maybe, SFT until it knows new facts
client.py   the API in the few calls that the tour needs
tasks.py    what is trained: prompts with rewards, facts with questions
stack.py    a stack of its own, when none is named
show.py     progress bars, tables and the picture of the reward
"""
