"""`groupwise push RUN --to OWNER/NAME`: what a run trained, on the Hugging Face hub, with a card of what was measured.

facts      a run's directory      -> what it was told and what was measured
card       the facts              -> the model card
rows       a run's rollouts       -> a dataset with its card
space      the facts              -> a page on which to chat with the model, for the hub's Spaces
contents   all of these           -> repositories and their files, on this machine
upload     the contents           -> the hub, by its own client
command    the command line
"""
