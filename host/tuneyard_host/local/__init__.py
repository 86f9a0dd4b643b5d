"""The whole service on one machine: an AWS emulator, the template deployed on it, the HTTP door, and the workers.

up.py tells the story; each other module is one chapter of it:
folder.py     the state folder: its lock, its key file, what it remembers
emulator.py   the emulated AWS, in a process of ours; snapshots.py keeps its state on disk
deploy.py     template.yaml deployed on it; sources.py packs the code
door.py       the HTTP address that people use
processes.py  children that are started again when they die; lifeline.py ends them when we die
"""
