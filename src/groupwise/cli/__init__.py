"""The command line: `groupwise run | serve | train | adapters | rollouts | check | doctor ...`."""

import sys

from groupwise.platform import UnsupportedPlatformError, require_supported

try:  # before anything else is imported, which may need what an old Python or Windows has not
    require_supported()
except UnsupportedPlatformError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
