"""The whole service on one machine: an AWS emulator, the template deployed on it, the HTTP door, the workers.

up.py tells the story; each other module is one chapter of it:
folder.py       the state folder: its lock, its key file, what it remembers
ports.py        the listening sockets, opened before the processes that serve them
emulator.py     the emulated AWS, in a process of ours; snapshots.py keeps its state on disk
deploy.py       template.yaml deployed on it; sources.py packs the code
environment.py  the settings of the other processes, read off the deployed stack
door.py         the HTTP address that people use; doors.py loads the functions behind it
workers.py      the trainer and the inference service as processes
sender.py       the webhook sender as a process; consumers.py, the threads that work a queue off
processes.py    children that are started again when they die; lifeline.py ends them when we die
readiness.py    when all of it serves; keys.py and screen.py, what a person needs then
"""
