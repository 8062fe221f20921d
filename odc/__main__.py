"""`python -m odc`, as torchrun starts it: `torchrun --nproc-per-node 2 -m odc train CONFIG`."""

import sys

from odc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
