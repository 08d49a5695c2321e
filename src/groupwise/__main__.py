"""`python -m groupwise` is `groupwise`."""

from groupwise.cli import main

main()
