"""`groupwise report`: the web interface with the data of a run, alone or with other runs, in one HTML file.

data       run directories  -> the answers that `groupwise ui` would give, up to the file's limit of size
pictures   the pictures in these answers, small, each once
page       the built web interface and these answers -> one file that makes no requests
build      calls these, one after the other
"""
