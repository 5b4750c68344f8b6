import sys

from opslot.cli import main

sys.exit(main())
