"""``python -m validation.emulator``: see `tests.support.seeds`."""

import sys

from tests.support.seeds import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
