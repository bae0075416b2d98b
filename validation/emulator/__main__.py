"""``python -m validation.emulator``: see `validation.emulator.seeds`."""

import sys

from validation.emulator.seeds import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
