"""`python -m groupwise` is `groupwise`."""

import sys

try:
    from groupwise.cli.main import main

    main()
except KeyboardInterrupt:  # while the command was being imported; what happens later is the command's
    print("stopped", file=sys.stderr)
    sys.exit(130)
