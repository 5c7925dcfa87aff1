import sys

from slime.train import main

sys.exit(main())
