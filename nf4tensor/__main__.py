"""`python -m nf4tensor` is the command `nf4tensor`."""

import sys

from nf4tensor.cli import main

sys.exit(main())
