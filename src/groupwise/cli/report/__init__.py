"""`groupwise report`: the web interface and what it shows of a run, alone or beside other runs, in one HTML file.

data       run directories  -> the answers that `groupwise ui` would give, as far as the file may grow
pictures   the pictures of these, small, each once
page       the built web interface and these answers -> one file that asks nobody for anything
build      these, one after the other
"""
