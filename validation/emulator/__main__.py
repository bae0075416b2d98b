"""``python -m validation.emulator``: see `tests.seeds`."""

import sys

from tests.seeds import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
