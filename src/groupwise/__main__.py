"""`python -m groupwise` is `groupwise`."""

from groupwise.cli.main import main

main()
